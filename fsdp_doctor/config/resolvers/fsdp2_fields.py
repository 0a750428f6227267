"""Canonical fields of frameworks that wrap a model in torch's FSDP2 themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_doctor.config.resolvers.mcore_settings import Settings, dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Keys:
    """Native keys of one framework."""

    switch: str
    tensor: str
    context: str
    sequence: str
    replicate: str
    offload: str
    recompute: str
    micro: str
    whole: str
    length: str
    optimizer: str
    clip: str
    precision: str


def fsdp2_fields(
    settings: Settings,
    keys: Fsdp2Keys,
    *,
    reduce: str,
    storage: str | None = None,
    impl: str = "fsdp2",
) -> None:
    """Set what FSDP2 has in common under every framework.

    ``reduce``: dtype of the reduction when none is given; ``storage``: of the parameters, None
    where they are kept as computed.
    """
    settings.take("sharding.impl", keys.switch, impl)
    settings.derive(
        "sharding.strategy", "optim_grads_params", (keys.switch,), "fully_shard divides all three"
    )
    _groups(settings, keys)
    settings.derive("sharding.reshard_after_forward", True, (keys.switch,), "all but the last unit")
    settings.derive(
        "sharding.reshard_after_forward[root]", False, (keys.switch,), "the root is not resharded"
    )
    offloaded = offload_word(settings.get(keys.offload))
    settings.take("offload.params", keys.offload, offloaded)
    why = "gradients and optimizer state live where the sharded parameters are"
    for name in ("grads", "optimizer"):
        settings.derive(f"offload.{name}", offloaded, (keys.offload,), why)
    settings.take("recompute.mode", keys.recompute, recompute_word(settings.get(keys.recompute)))
    _precision(settings, keys, reduce, storage)
    _batch(settings, keys)
    kind = str(settings.get(keys.optimizer) or "").rpartition(".")[2].lower()
    settings.take("optimizer.kind", keys.optimizer, kind or None)
    settings.take("optimizer.grad_clip", keys.clip)


def offload_word(value: Any) -> str:
    """Return ``cpu`` for a switch that is on, or an offload policy; else ``none``."""
    return "none" if value in (None, False, "none") else "cpu"


def recompute_word(value: Any) -> str:
    """Return the mode of a switch that may also name a mode."""
    if isinstance(value, str):
        return value
    return "full" if value else "none"


def _groups(settings: Settings, keys: Fsdp2Keys) -> None:
    tp = settings.number(keys.tensor) or 1
    cp = settings.number(keys.context) or 1
    settings.take("parallel.tp", keys.tensor, tp)
    settings.take("parallel.cp", keys.context, cp)
    settings.take("parallel.sp", keys.sequence, settings.on(keys.sequence))
    if tp == 1:
        settings.inert("parallel.sp", "the tensor-parallel size is 1")
    replicas = settings.number(keys.replicate) or 1
    settings.take("sharding.replicate_size", keys.replicate, replicas)
    world = settings.number("world_size")
    shard = None if world is None else max(world // (tp * replicas), 1)
    names = ("world_size", keys.replicate, keys.tensor, keys.switch)
    settings.derive("sharding.shard_size", shard, names, "ranks / (tensor x replicas)")
    settings.take("world.size", "world_size", world)


def _precision(settings: Settings, keys: Fsdp2Keys, reduce: str, storage: str | None) -> None:
    compute = dtype_name(settings.get(keys.precision)) or "bfloat16"
    settings.take("precision.compute", keys.precision, compute)
    stored = storage or compute
    why = "loaded in this dtype"
    settings.derive("precision.param_storage", stored, (keys.precision,), why)
    for name in ("grad", "optim_states"):
        why = "as the stored parameters"
        settings.derive(f"precision.{name}", stored, (keys.precision,), why)
    settings.derive(
        "precision.reduce", reduce, (keys.switch,), "the default of this version's policy"
    )


def _batch(settings: Settings, keys: Fsdp2Keys) -> None:
    settings.take("batch.micro", keys.micro)
    settings.take("batch.global", keys.whole)
    settings.take("batch.seq_len", keys.length)
    micro, whole = settings.number(keys.micro), settings.number(keys.whole)
    world = settings.number("world_size")
    steps = None
    if micro and whole and world:
        inner = (settings.number(keys.tensor) or 1) * (settings.number(keys.context) or 1)
        ranks = max(world // inner, 1)
        steps = whole // (micro * ranks) if whole % (micro * ranks) == 0 else None
    names = (keys.whole, keys.micro, "world_size", keys.tensor, keys.context)
    settings.derive("batch.accumulation", steps, names, "global / (micro x data-parallel ranks)")
