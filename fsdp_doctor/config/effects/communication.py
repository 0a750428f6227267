"""DDP buckets and hooks, prefetching, rate limit, gradient synchronisation."""

from __future__ import annotations

from fsdp_doctor.config.effects.base import (
    DDP,
    FSDP1,
    FSDP2,
    FSDP2_PARAM,
    EffectContext,
    EffectRule,
    compare_order,
    computed,
    earlier_gradients,
    effect,
    opposite,
    rises,
)
from fsdp_doctor.model.config import ConfigChange, Direction, Effect
from fsdp_doctor.model.memory import Category, Phase


def _bucket_view(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    way: Direction = "down" if change.b.value else "up"
    why = "gradients live in the buckets, so the buckets' own copy is not needed"
    return (computed(context, Category.COMMUNICATION, way, why, DDP),)


def _bucket_bytes(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    if context.either_side("comm.hook", "fp16_compress") or context.either_side(
        "comm.hook", "bf16_compress"
    ):
        why = "the hook's compressed copies are as large as a bucket"
        return (effect(Category.COMMUNICATION, rises(change), why, DDP),)
    why = "the buckets together always hold every gradient once"
    return (effect(Category.COMMUNICATION, "none", why, DDP, amount=0),)


def _hook(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    way = compare_order(change.a.value != "none", change.b.value != "none", (False, True))
    why = "each bucket in flight has a compressed copy"
    source = "torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py (2.13)"
    return (effect(Category.COMMUNICATION, way, why, source, phase=Phase.BACKWARD),)


def _prefetch(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    forward = change.key == "comm.prefetch_fwd"
    phase = Phase.FORWARD if forward else Phase.BACKWARD
    way = (
        rises(change)
        if forward
        else compare_order(change.a.value, change.b.value, ("none", "post", "pre"))
    )
    why = "the next unit is gathered while this one is still whole"
    return (
        effect(Category.UNSHARDED_PARAMETERS, way, why, FSDP1, phase=phase),
        effect(Category.COMMUNICATION, way, why, FSDP1, phase=phase),
    )


def _limit(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    way = opposite(rises(change))
    why = "the limit keeps at most two gathered units in flight"
    return (
        effect(Category.UNSHARDED_PARAMETERS, way, why, FSDP1),
        effect(Category.COMMUNICATION, way, why, FSDP1),
    )


def _grad_sync(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    if not context.sharded or context.value("batch.accumulation") == 1:
        return ()  # DDP's gradients are whole anyway; one micro step has nothing to wait for
    waits = change.b.value == "last_microbatch"
    up: Direction = "up" if waits else "down"
    why = "without synchronisation every micro step adds to whole gradients on each rank"
    return (
        computed(context, Category.UNSHARDED_GRADIENTS, up, why, FSDP2_PARAM, zero_is_open=True),
        *earlier_gradients(opposite(up), context.after, context.sizes_after),
        effect(
            Category.COMMUNICATION, "either", "gradients are reduced in one micro step only", FSDP2
        ),
        effect(
            Category.TEMPORARIES,
            "either",
            "gradients are cast and added to the whole ones",
            FSDP2_PARAM,
            phase=Phase.BACKWARD,
        ),
        *_kept_parameters(up, context),
    )


def _kept_parameters(up: Direction, context: EffectContext) -> tuple[Effect, ...]:
    if context.value("sharding.impl") != "fsdp1" or context.value("sharding.reshard_after_forward"):
        return ()
    why = "without synchronisation SHARD_GRAD_OP does not free its units in backward either"
    return (effect(Category.UNSHARDED_PARAMETERS, up, why, FSDP1),)


def _nothing(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    """No memory on the device changes."""
    return ()


RULES: dict[str, EffectRule] = {
    "comm.bucket_view": _bucket_view,
    "comm.bucket_bytes": _bucket_bytes,
    "comm.hook": _hook,
    "comm.prefetch_bwd": _prefetch,
    "comm.prefetch_fwd": _prefetch,
    "comm.limit_all_gathers": _limit,
    "comm.grad_sync": _grad_sync,
    "offload.pin_memory": _nothing,
    "ddp.static_graph": _nothing,
    "ddp.find_unused_parameters": _nothing,
}
