"""Rules a spec must keep beyond types: sizes, divisibility, and what torch itself refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from fsdp_doctor.config.validate_megatron import megatron
from fsdp_doctor.config.yaml_source import Places
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.spec import MeshConfig, ProfileSpec

HYBRID_STRATEGIES = frozenset({"HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"})
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_LARGEST = 1 << 40

Violation = tuple[str, str, str | None]
"""Key path, what is wrong, what to do."""


def validate(spec: ProfileSpec, places: Places) -> None:
    """Raise InputError for the first broken rule, naming its key and place."""
    for rule in (_sizes, _model, _steps, _fsdp1, _fsdp2, _precision, _optimizer, megatron):
        for path, message, hint in rule(spec):
            raise InputError(message, where=places.where(path), hint=hint)


def _at_least(path: str, value: float | None, least: int) -> Iterator[Violation]:
    if value is None:
        return
    if value < least:
        yield path, f"must be at least {least}, not {value}", None
    elif value > _LARGEST:
        yield path, f"{value} is out of all proportion", None


def _sizes(spec: ProfileSpec) -> Iterator[Violation]:
    model = spec.workload.model
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
        yield from _at_least(f"workload.model.{name}", getattr(model, name), 1)
    yield from _at_least("workload.micro_batch", spec.workload.micro_batch, 1)
    yield from _at_least("workload.sequence_length", spec.workload.sequence_length, 1)
    yield from _at_least("workload.seed", spec.workload.seed, 0)
    yield from _at_least("world_size", spec.world_size, 1)
    config = spec.config
    yield from _at_least("config.fsdp2.blocks_per_unit", config.fsdp2.blocks_per_unit, 1)
    yield from _at_least(
        "config.activation_checkpointing.every_n", config.activation_checkpointing.every_n, 1
    )
    yield from _at_least(
        "config.gradient_accumulation.steps", config.gradient_accumulation.steps, 1
    )
    bucket = config.ddp.bucket_cap_mb
    if bucket is not None and not (math.isfinite(bucket) and bucket > 0):
        yield "config.ddp.bucket_cap_mb", f"must be more than 0 MiB, not {bucket}", None


def _model(spec: ProfileSpec) -> Iterator[Violation]:
    model = spec.workload.model
    if model.factory is None:
        yield from _gpt_shape(spec)
        if model.batch is not None:
            yield "workload.model.batch", "batch is given without factory", "give both or neither"
        if model.kwargs:
            yield "workload.model.kwargs", "kwargs is given without factory", "they go to factory"
    elif model.batch is None:
        yield (
            "workload.model.factory",
            "factory is given without batch",
            "batch makes the model's input",
        )
    for name in ("factory", "batch", "loss"):
        value = getattr(model, name)
        if value is not None and not _IMPORT_PATH.fullmatch(value):
            yield (
                f"workload.model.{name}",
                f"{value!r} is not an import path",
                "write package.module:function",
            )


def _gpt_shape(spec: ProfileSpec) -> Iterator[Violation]:
    model = spec.workload.model
    if model.hidden % model.heads:
        yield (
            "workload.model.heads",
            f"{model.heads} heads do not divide hidden {model.hidden}",
            None,
        )
    elif (model.hidden // model.heads) % 2:
        yield (
            "workload.model.heads",
            f"hidden / heads is {model.hidden // model.heads}, which is odd",
            "rotary position embedding turns pairs of channels",
        )
    if model.kv_heads is not None and model.heads % model.kv_heads:
        yield (
            "workload.model.kv_heads",
            f"{model.kv_heads} key/value heads do not divide {model.heads} heads",
            None,
        )


def _steps(spec: ProfileSpec) -> Iterator[Violation]:
    if spec.steps.warmup < 3:
        yield (
            "steps.warmup",
            f"must be at least 3, not {spec.steps.warmup}",
            "optimizer state and the allocator's pools settle in the first steps",
        )
    yield from _at_least("steps.warmup", spec.steps.warmup, 3)
    yield from _at_least("steps.timed", spec.steps.timed, 1)
    if not spec.name.strip():
        yield "name", "is empty", "remove it to use the file's name"


def _mesh(path: str, mesh: MeshConfig, world_size: int) -> Iterator[Violation]:
    yield from _at_least(f"{path}.replicate", mesh.replicate, 1)
    yield from _at_least(f"{path}.shard", mesh.shard, 1)
    if mesh.replicate * mesh.shard != world_size:
        yield (
            path,
            f"replicate {mesh.replicate} x shard {mesh.shard} = {mesh.replicate * mesh.shard} "
            f"ranks, but world_size is {world_size}",
            "their product must be world_size",
        )


def _fsdp1(spec: ProfileSpec) -> Iterator[Violation]:
    fsdp1 = spec.config.fsdp1
    if fsdp1.wrap == []:
        yield "config.fsdp1.wrap", "the list of classes is empty", "write none for one unit"
    if spec.config.strategy != "fsdp1":
        return
    hybrid = fsdp1.sharding_strategy in HYBRID_STRATEGIES
    if hybrid and fsdp1.mesh is None:
        yield (
            "config.fsdp1.sharding_strategy",
            f"{fsdp1.sharding_strategy} needs config.fsdp1.mesh",
            "e.g. mesh: {replicate: 2, shard: 4}",
        )
    if fsdp1.mesh is not None:
        if not hybrid:
            yield (
                "config.fsdp1.mesh",
                f"a 2-D mesh does not go with {fsdp1.sharding_strategy}",
                "use HYBRID_SHARD, or remove mesh",
            )
        yield from _mesh("config.fsdp1.mesh", fsdp1.mesh, spec.world_size)
    yield from _fsdp1_combinations(spec)


def _fsdp1_combinations(spec: ProfileSpec) -> Iterator[Violation]:
    fsdp1, accumulation = spec.config.fsdp1, spec.config.gradient_accumulation
    offloaded = fsdp1.cpu_offload is not None and fsdp1.cpu_offload.offload_params
    if offloaded and accumulation.steps > 1 and accumulation.sync == "every_microbatch":
        yield (
            "config.fsdp1.cpu_offload",
            "FSDP1 with CPU offload cannot accumulate gradients outside no_sync()",
            "set config.gradient_accumulation.sync: last_microbatch",
        )
    if spec.config.compile and not fsdp1.use_orig_params:
        yield (
            "config.compile",
            "torch.compile under FSDP1 needs use_orig_params",
            "set config.fsdp1.use_orig_params: true",
        )


def _fsdp2(spec: ProfileSpec) -> Iterator[Violation]:
    fsdp2 = spec.config.fsdp2
    if fsdp2.wrap == []:
        yield "config.fsdp2.wrap", "the list of classes is empty", "write none for one unit"
    if spec.config.strategy != "fsdp2":
        return
    if fsdp2.mesh is not None:
        yield from _mesh("config.fsdp2.mesh", fsdp2.mesh, spec.world_size)
    reshard = fsdp2.reshard_after_forward
    shard_size = spec.world_size if fsdp2.mesh is None else fsdp2.mesh.shard
    whole = isinstance(reshard, int) and not isinstance(reshard, bool)
    # torch/distributed/fsdp/_fully_shard/_fsdp_init.py: _get_post_forward_mesh_info
    if whole and reshard is not None and (reshard < 1 or shard_size % reshard):
        yield (
            "config.fsdp2.reshard_after_forward",
            f"{reshard} is not a factor of the shard size {shard_size}",
            "torch reshards to groups of equal size",
        )


def _precision(spec: ProfileSpec) -> Iterator[Violation]:
    precision, config = spec.config.precision, spec.config
    if not precision.grad_scaler:
        return
    path = "config.precision.grad_scaler"
    if precision.parameters == "float16":
        yield (
            path,
            "GradScaler cannot unscale float16 gradients",
            "keep config.precision.parameters: float32",
        )
    computes = {
        "ddp": None,
        "fsdp1": config.fsdp1.mixed_precision and config.fsdp1.mixed_precision.param_dtype,
        "fsdp2": config.fsdp2.mp_policy and config.fsdp2.mp_policy.param_dtype,
    }.get(config.strategy)
    if precision.autocast != "float16" and computes != "float16":
        yield path, "GradScaler is for float16 only", "set config.precision.autocast: float16"


def _optimizer(spec: ProfileSpec) -> Iterator[Violation]:
    optimizer = spec.config.optimizer
    for name in ("learning_rate", "weight_decay", "momentum", "max_grad_norm"):
        value = getattr(optimizer, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            yield f"config.optimizer.{name}", f"must be a finite number from 0, not {value}", None
    if optimizer.max_grad_norm == 0:
        yield "config.optimizer.max_grad_norm", "0 would erase every gradient", "null: no clipping"
