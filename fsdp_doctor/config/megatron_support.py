"""What an installed version cannot run, or runs wrong: found before training, named by its rule.

Rules of Megatron are those of ``config/rules``; a few of this tool's own (``MV...``) say what its
profiled jobs meet beyond them.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping

from fsdp_doctor.config.megatron_native import installed_core, rules_view
from fsdp_doctor.config.rules.engine import check_config
from fsdp_doctor.config.rules.view import Job
from fsdp_doctor.config.versions import at_least
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import Violation
from fsdp_doctor.model.spec import ProfileSpec

WRONG = frozenset({"MG058", "MG059", "MV005", "MV007"})
"""Rules of combinations that run and compute wrong gradients: reported, not refused."""

BY_FORMAT = frozenset({"MG024", "MG025a"})
"""Megatron's rules on checkpoint formats; where one speaks, this tool's own (MV003) need not."""

FORMATS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("torch_dcp", "full"),
    "fsdp1": ("torch_dcp", "full"),
    "fsdp2": ("torch_dcp", "full"),
    "megatron_ddp": ("torch_dist", "full"),
    "megatron_distopt": ("torch_dist",),
    "megatron_fsdp": ("fsdp_dtensor",),
    "mcore_torch_fsdp2": ("torch_dcp",),
    "standalone": ("torch_dcp",),
}
"""Engine -> checkpoint formats that fit what it shards."""
_PACKAGES = ("megatron-core", "megatron-fsdp", "torch", "transformer-engine")


def engine_of(spec: ProfileSpec) -> str:
    """Return the engine of a spec, a key of ``FORMATS``."""
    if spec.config.strategy == "megatron":
        return spec.config.megatron.engine
    return "standalone" if spec.config.strategy == "megatron_fsdp" else spec.config.strategy


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that rules speak of, where installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def broken_rules(
    spec: ProfileSpec,
    *,
    fake: bool = False,
    on_cpu: bool = False,
    versions: Mapping[str, str] | None = None,
) -> list[Violation]:
    """Return the rules (severity error) that a spec breaks with the installed versions.

    ``fake``: as one rank of many, through a fake process group; ``on_cpu``: on CPU processes.
    """
    known = installed_versions() if versions is None else versions
    found = list(own_rules(spec, known, fake=fake, on_cpu=on_cpu))
    if spec.config.strategy == "megatron":
        native = rules_view(spec, versions=known)
        result = check_config(native, job=Job(world_size=spec.world_size, versions=known))
        wanted = [v for v in result.violations if v.severity == "error" and _concerns(v, spec)]
        told = {v.rule for v in wanted}
        if told & BY_FORMAT:
            found = [v for v in found if v.rule != "MV003"]
        found = [*wanted, *found]
    return found


def _concerns(violation: Violation, spec: ProfileSpec) -> bool:
    """Whether a rule speaks of what will happen: those on checkpoints only where one is saved."""
    about = any(field.startswith("checkpoint.") for field in violation.fields)
    return spec.checkpoint is not None or not about


def refuse(spec: ProfileSpec, *, fake: bool = False, on_cpu: bool = False) -> None:
    """Raise InputError with the rule when the installed version cannot run this spec."""
    if spec.config.strategy == "megatron" and installed_core() is None:
        return  # the ranks say which package is missing
    for violation in broken_rules(spec, fake=fake, on_cpu=on_cpu):
        if violation.rule not in WRONG:
            raise InputError(
                f"rule {violation.rule}: {violation.message}",
                where=", ".join(violation.fields) or "config",
                hint=violation.fix,
            )


def known_wrong(spec: ProfileSpec) -> list[Violation]:
    """Return the rules by which the installed version computes wrong gradients here."""
    return [v for v in broken_rules(spec) if v.rule in WRONG]


def own_rules(
    spec: ProfileSpec,
    versions: Mapping[str, str],
    *,
    fake: bool = False,
    on_cpu: bool = False,
) -> Iterator[Violation]:
    """Yield the rules of this tool's own that a spec breaks; see ``broken_rules``."""
    engine, core = engine_of(spec), versions.get("megatron-core")
    ddp = spec.config.megatron.ddp
    old = core is not None and not at_least(core, "0.19")
    if engine == "megatron_fsdp" and core is not None:
        strategy = ddp.data_parallel_sharding_strategy
        gathers = not ddp.overlap_param_gather and not at_least(core, "0.18")
        if strategy == "no_shard" and gathers:
            yield _violation(
                "MV001",
                ("config.megatron.ddp.overlap_param_gather",),
                "Megatron-FSDP no_shard has no weight buffer, and without overlap_param_gather the "
                "optimizer step asks for it (AttributeError).",
                "Turn overlap_param_gather on.",
                "megatron-core <0.18 (run with 0.16.1, 0.17.1 and 0.18.2)",
            )
        if fake and strategy != "no_shard" and not at_least(core, "0.17"):
            yield _violation(
                "MV002",
                ("config.megatron.ddp.data_parallel_sharding_strategy",),
                "this version checks shards across ranks while wrapping, which a fake process "
                "group cannot answer (validate_uneven_dtensor).",
                "Use megatron-core 0.17 or later, or real ranks.",
                "megatron-core <0.17 (run with 0.16.1 and 0.17.1)",
            )
    if engine == "megatron_fsdp" and core is not None and spec.world_size == 1 and not fake:
        yield from _single_rank_rules(spec, core)
    outer = ddp.outer_dp_sharding_strategy == "optim"
    if engine == "megatron_fsdp" and outer and ddp.num_distributed_optimizer_instances > 1 and old:
        yield _violation(
            "MV007",
            ("config.megatron.ddp.outer_dp_sharding_strategy",),
            "the gradient norm covers only the shards of a rank's own outer group, so clipping "
            "differs between ranks (4 ranks, 2 instances: 0.630 and 0.618 in place of 0.883).",
            "Use outer_dp_sharding_strategy no_shard, or clip_grad 0.",
            "megatron-core <0.19 (run with 0.16.1)",
        )
    if engine == "standalone" and "megatron-core" in versions and old:
        yield _violation(
            "MG126",
            ("config.strategy",),
            "the standalone megatron_fsdp imports the config class of the megatron-core beside it, "
            "which before 0.19 lacks its fields (TypeError).",
            "Use megatron-core 0.19 or later, or remove it.",
            "megatron-core <0.19",
        )
    if on_cpu and spec.config.strategy == "megatron":
        yield from _cpu_rules(spec)
    yield from _format_rules(spec, engine, fake=fake)


def _single_rank_rules(spec: ProfileSpec, core: str) -> Iterator[Violation]:
    """MV005, by ``megatron_fsdp/param_and_grad_buffer.py`` at 0.16.1, 0.17.1, 0.18.2 and 0.19.2.

    With one rank the gradient buffer is not sharded, so what is reduced is the buffer itself, and
    ``local_grad += reduced_grad`` adds it to itself with every micro batch (1 micro batch: norm x
    2.0, 2: x 3.2). Since 0.17 that line is skipped then, but for a communication dtype of its own.
    """
    ddp = spec.config.megatron.ddp
    strategy = ddp.data_parallel_sharding_strategy
    stored = "bfloat16" if spec.config.megatron.model.bf16 else "float32"
    grads, reduced = (
        None if name == "auto" else name
        for name in (ddp.megatron_fsdp_main_grads_dtype, ddp.megatron_fsdp_grad_comm_dtype)
    )
    recent = at_least(core, "0.17")
    cast = reduced is not None and reduced != (grads or stored)
    if strategy in ("optim_grads", "optim_grads_params") and (cast or not recent):
        fields = ("config.megatron.ddp.megatron_fsdp_grad_comm_dtype",) if recent else ()
        fix = "Unset the communication dtype" if recent else "Use megatron-core 0.17 or later"
        yield _violation(
            "MV005",
            ("world_size", *fields),
            f"with a single data-parallel rank Megatron-FSDP {strategy} "
            + (f"that reduces in {reduced} " if recent else "")
            + "adds the gradients to themselves (norm x 2.0 with 1 micro batch, x 3.2 with 2).",
            f"{fix}, or use two ranks or more, or Megatron's DDP.",
            "megatron-core <0.17; with a communication dtype all (run with 0.16.1 and 0.19.2)",
        )


def _cpu_rules(spec: ProfileSpec) -> Iterator[Violation]:
    if spec.config.megatron.optimizer.optimizer_cpu_offload:
        yield _violation(
            "MV006",
            ("config.megatron.optimizer.optimizer_cpu_offload",),
            "there is no GPU to offload the optimizer from: on CPU processes Megatron's hybrid "
            "optimizer finds every parameter on the host already.",
            "Set it to false, or run on a GPU.",
            "all",
        )


def _format_rules(spec: ProfileSpec, engine: str, *, fake: bool) -> Iterator[Violation]:
    chosen, fitting = spec.checkpoint, FORMATS[engine]
    if chosen is None:
        return
    if chosen not in fitting:
        yield _violation(
            "MV003",
            ("checkpoint",),
            f"{chosen} does not hold what {engine} shards.",
            f"Use {' or '.join(fitting)}.",
            "all",
        )
    elif fake and chosen in ("torch_dist", "full"):
        yield _violation(
            "MV004",
            ("checkpoint",),
            f"{chosen} gathers from all ranks, which a fake process group cannot do.",
            "Use real ranks, or a sharded format.",
            "all",
        )


def _violation(
    rule: str, fields: tuple[str, ...], message: str, fix: str, versions: str
) -> Violation:
    return Violation(
        rule=rule,
        severity="error",
        fields=fields,
        values={},
        message=message,
        fix=fix,
        versions=versions,
        source="run by this tool",
    )
