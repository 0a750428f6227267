"""Rules a Megatron spec must keep whatever the version: sizes, ranges, what is not built here.

Rules of Megatron's versions are checked when a job starts (``config.megatron_support``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fsdp_doctor.model.spec import ProfileSpec

Violation = tuple[str, str, str | None]
_PATH = "config.megatron"


def megatron(spec: ProfileSpec) -> Iterator[Violation]:
    """Yield every broken rule of the sections under ``config.megatron``."""
    if spec.config.strategy == "megatron_fsdp":
        yield from _standalone(spec)
    if spec.config.strategy != "megatron":
        return
    if spec.workload.model.factory is not None:
        yield (
            "workload.model.factory",
            "strategy megatron trains Megatron-Core's own GPT",
            "give the shape (layers, hidden, heads, ...) instead",
        )
    yield from _numbers(spec)
    yield from _recompute(spec)
    yield from _groups(spec)


def _standalone(spec: ProfileSpec) -> Iterator[Violation]:
    config = spec.config
    if config.optimizer.max_grad_norm is not None:
        yield (
            "config.optimizer.max_grad_norm",
            "megatron_fsdp reduces gradients in optimizer.step, after any clipping",
            "null: no clipping",
        )
    if config.precision.grad_scaler or config.compile:
        name = "precision.grad_scaler" if config.precision.grad_scaler else "compile"
        yield f"config.{name}", "is not built for the standalone megatron_fsdp", None


def _numbers(spec: ProfileSpec) -> Iterator[Violation]:
    ddp, optimizer = spec.config.megatron.ddp, spec.config.megatron.optimizer
    counts = {
        "num_distributed_optimizer_instances": ddp.num_distributed_optimizer_instances,
        "bucket_size": ddp.bucket_size,
        "suggested_communication_unit_size": ddp.suggested_communication_unit_size,
    }
    for name, count in counts.items():
        if count is not None and count < 1:
            yield f"{_PATH}.ddp.{name}", f"must be at least 1, not {count}", None
    for name in ("lr", "weight_decay", "clip_grad"):
        value = getattr(optimizer, name)
        if not (math.isfinite(value) and value >= 0):
            yield f"{_PATH}.optimizer.{name}", f"must be a finite number from 0, not {value}", None
    fraction = optimizer.optimizer_offload_fraction
    if not 0 <= fraction <= 1:
        path = f"{_PATH}.optimizer.optimizer_offload_fraction"
        yield path, f"must be between 0 and 1, not {fraction}", None


def _recompute(spec: ProfileSpec) -> Iterator[Violation]:
    layers = spec.config.megatron.model.recompute_num_layers
    if layers is not None and not 1 <= layers <= spec.workload.model.layers:
        yield (
            f"{_PATH}.model.recompute_num_layers",
            f"must be between 1 and the {spec.workload.model.layers} layers, not {layers}",
            None,
        )


def _groups(spec: ProfileSpec) -> Iterator[Violation]:
    instances = spec.config.megatron.ddp.num_distributed_optimizer_instances
    if instances > 0 and spec.world_size % instances:
        yield (
            f"{_PATH}.ddp.num_distributed_optimizer_instances",
            f"{instances} instances do not divide {spec.world_size} ranks",
            None,
        )
