"""Does a config train right? Two ranks, a few steps, beside the same model under plain DDP.

No torch in this process; the ranks import it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fsdp_doctor.config.megatron_support import (
    FORMATS,
    WRONG,
    broken_rules,
    engine_of,
    installed_versions,
)
from fsdp_doctor.config.spec import WrittenSpec
from fsdp_doctor.gpus import visible_gpu_count
from fsdp_doctor.model.config import Violation
from fsdp_doctor.model.megatron_spec import MegatronConfig, MegatronDDP, MegatronDist
from fsdp_doctor.model.run import Run
from fsdp_doctor.model.spec import (
    CheckpointFormat,
    Precision,
    ProfileSpec,
    StepPlan,
    TrainingConfig,
)
from fsdp_doctor.profiler.launch import LaunchOptions, profile_many
from fsdp_doctor.profiler.supervise import Progress
from fsdp_doctor.runs.reader import read_records

Status = Literal["passed", "failed", "not_checked"]

_BIG = 1e9
"""A clipping limit that clips nothing: the norm is computed for its sake."""
_TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2, "float16": 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    text: str
    rule: str | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The verdict on a spec."""

    spec: str
    verdict: Literal["passed", "failed"]
    engine: str
    device: str
    ranks: int
    checkpoint: str | None
    versions: Mapping[str, str]
    checks: tuple[Check, ...]


def verify_spec(
    written: WrittenSpec, ranks: int, options: LaunchOptions, folder: Path, progress: Progress
) -> Verification:
    """Check the rules, then train, save and load, and compare with DDP; runs lie in ``folder``."""
    device = _device(options, ranks)
    asked = _small(written.spec, ranks, device)
    violations = broken_rules(asked)
    checks = [_rule_check(violation) for violation in violations]
    refused = [v for v in violations if v.rule not in WRONG]
    if not refused:
        twin = _twin(asked)
        options = replace(options, observe=False, force=True)
        jobs = [(WrittenSpec(spec=spec, written={}), folder / spec.name) for spec in (asked, twin)]
        run, other = profile_many(jobs, options, progress)
        checks += _run_checks(run, other, asked)
    checks += _unseen(written.spec, device)
    failed = any(check.status == "failed" for check in checks)
    return Verification(
        spec=written.spec.name,
        verdict="failed" if failed else "passed",
        engine=engine_of(asked),
        device=device,
        ranks=ranks,
        checkpoint=asked.checkpoint,
        versions=installed_versions(),
        checks=tuple(checks),
    )


def _device(options: LaunchOptions, ranks: int) -> str:
    if options.device != "auto":
        return options.device
    return "cuda" if visible_gpu_count() >= ranks else "cpu"


def _small(spec: ProfileSpec, ranks: int, device: str) -> ProfileSpec:
    """The spec with few steps, its checkpoint, and a gradient norm that is computed."""
    config = spec.config
    if config.strategy == "megatron":
        optimizer = config.megatron.optimizer
        optimizer = replace(
            optimizer,
            clip_grad=optimizer.clip_grad or _BIG,
            optimizer_cpu_offload=optimizer.optimizer_cpu_offload and device == "cuda",
        )
        config = replace(config, megatron=replace(config.megatron, optimizer=optimizer))
    elif config.strategy != "megatron_fsdp" and config.optimizer.max_grad_norm is None:
        config = replace(config, optimizer=replace(config.optimizer, max_grad_norm=_BIG))
    return replace(
        spec,
        config=config,
        world_size=ranks,
        steps=StepPlan(warmup=3, timed=1, kernel_profile=False),
        checkpoint=spec.checkpoint or _own_format(spec),
    )


def _own_format(spec: ProfileSpec) -> CheckpointFormat:
    """The format that the config would save in; torch has none of its own."""
    if spec.config.strategy == "megatron":
        return spec.config.megatron.checkpoint.ckpt_format
    return "torch_dcp" if "torch_dcp" in FORMATS[engine_of(spec)] else "full"


def _twin(spec: ProfileSpec) -> ProfileSpec:
    """The same model, data and precision under plain DDP."""
    config = spec.config
    if config.strategy == "megatron":
        ddp = config.megatron.ddp
        fp32 = ddp.grad_reduce_in_fp32 or ddp.megatron_fsdp_main_grads_dtype == "float32"
        plain = replace(
            config.megatron,
            dist=MegatronDist(),
            ddp=MegatronDDP(grad_reduce_in_fp32=fp32),
            optimizer=replace(config.megatron.optimizer, optimizer_cpu_offload=False),
        )
        plain = replace(plain, model=replace(plain.model, init_model_with_meta_device=False))
        config = replace(config, megatron=_as_config(plain))
    else:
        config = TrainingConfig(
            strategy="ddp",
            precision=replace(_plain_precision(config), grad_scaler=False),
            gradient_accumulation=config.gradient_accumulation,
            optimizer=replace(
                config.optimizer, max_grad_norm=config.optimizer.max_grad_norm or _BIG
            ),
        )
    return replace(spec, name=f"{spec.name}-ddp", config=config, checkpoint=None)


def _as_config(config: MegatronConfig) -> MegatronConfig:
    return replace(config, checkpoint=MegatronConfig().checkpoint)


def _plain_precision(config: TrainingConfig) -> Precision:
    """DDP computes in the dtype of the sharding engine's policy through autocast."""
    policy = config.fsdp2.mp_policy if config.strategy == "fsdp2" else config.fsdp1.mixed_precision
    dtype = policy.param_dtype if policy is not None else None
    if dtype is None or dtype == "float32" or config.precision.autocast is not None:
        return config.precision
    return replace(config.precision, autocast=dtype)


def _rule_check(violation: Violation) -> Check:
    return Check(
        name="rules",
        status="failed",
        text=violation.message,
        rule=violation.rule,
        fix=violation.fix,
    )


def _run_checks(run: Run, twin: Run, spec: ProfileSpec) -> Iterator[Check]:
    failure = run.manifest.failure
    if failure is not None:
        yield Check(name="training", status="failed", text=failure.message)
        return
    steps = [step for series in run.ranks for step in series.steps if step.kind != "checkpoint"]
    bad = [step for step in steps if step.loss_finite is False]
    yield Check(
        name="loss",
        status="failed" if bad else "passed",
        text=f"not finite at step {bad[0].step}" if bad else f"finite at all {len(steps)} steps",
    )
    yield from _checkpoint_check(run, spec)
    if twin.manifest.failure is not None:
        text = f"plain DDP did not run: {twin.manifest.failure.message}"
        yield Check(name="gradients", status="not_checked", text=text)
        return
    yield _agreement("gradients", _norms(run), _norms(twin), spec)
    yield _agreement("losses", _losses(run), _losses(twin), spec)


def _checkpoint_check(run: Run, spec: ProfileSpec) -> Iterator[Check]:
    if run.directory is None or spec.checkpoint is None:
        return
    done = [
        record
        for series in run.ranks
        for record in read_records(run.directory, series.rank)
        if record["record"] == "checkpoint"
    ]
    whole = bool(done) and all(record["restored"] is not False for record in done)
    text = f"{spec.checkpoint}: saved and loaded, parameters restored on {len(done)} ranks"
    if not whole:
        text = f"{spec.checkpoint}: the loaded parameters are not the saved ones"
    yield Check(name="checkpoint", status="passed" if whole else "failed", text=text)


def _agreement(
    name: str, ours: Mapping[int, float], plain: Mapping[int, float], spec: ProfileSpec
) -> Check:
    steps = sorted(ours.keys() & plain.keys())
    if not steps:
        return Check(name=name, status="not_checked", text="not recorded by this engine")
    worst = max(steps, key=lambda step: _apart(ours[step], plain[step]))
    apart, limit = _apart(ours[worst], plain[worst]), _TOLERANCE[_dtype(spec)]
    what = "gradient norm" if name == "gradients" else "loss"
    text = (
        f"{what} at step {worst}: {ours[worst]:.6g}, under DDP {plain[worst]:.6g} "
        f"({apart:.2%} apart, {limit:.1%} allowed)"
    )
    return Check(name=name, status="passed" if apart <= limit else "failed", text=text)


def _apart(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(b), 1e-12)


def _dtype(spec: ProfileSpec) -> str:
    config = spec.config
    if config.strategy == "megatron":
        return "bfloat16" if config.megatron.model.bf16 else "float32"
    precision = _plain_precision(config)
    return precision.autocast or precision.parameters


def _norms(run: Run) -> dict[int, float]:
    if run.directory is None:
        return {}
    return {
        record["step"]: record["value"]
        for record in read_records(run.directory, run.ranks[0].rank)
        if record["record"] == "gradient_norm"
    }


def _losses(run: Run) -> dict[int, float]:
    """The mean over ranks of each step's loss (ranks see different tokens)."""
    found: dict[int, list[float]] = {}
    for series in run.ranks:
        for step in series.steps:
            if step.loss is not None:
                found.setdefault(step.step, []).append(step.loss)
    return {step: sum(values) / len(values) for step, values in found.items()}


def _unseen(spec: ProfileSpec, device: str) -> Iterator[Check]:
    if device != "cpu":
        return
    texts = {
        "memory": "on a CPU peaks say nothing about a GPU",
        "communication": "gloo stood in for NCCL; streams and overlap did not run",
    }
    if spec.config.megatron.optimizer.optimizer_cpu_offload:
        texts["optimizer offload"] = "there is no GPU to offload from; it was left out"
    for name, text in texts.items():
        yield Check(name=name, status="not_checked", text=text)
