"""What is known from reports of the field: allocator settings, losses in chunks, engines of forks.

Directions only; no formula. Each says where it was seen.
"""

from __future__ import annotations

from fsdp_doctor.config.effects.base import (
    EffectContext,
    EffectRule,
    TimeRule,
    effect,
    opposite,
    rises,
)
from fsdp_doctor.model.config import ConfigChange, Direction, Effect, StepTimeEffect
from fsdp_doctor.model.memory import Category

RESERVED_UNALLOCATED = "reserved_unallocated"
ALLOCATOR = "c10/cuda/CUDACachingAllocator.cpp (2.13)"
STREAMS = "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (2.6); report on torchtitan, FSDP2 + TP"
CHUNKS = "report on trl 2026-04, SFTTrainer with FSDP2: +50 % step time with resharding"
OVERLAPPED = "report on Megatron-LLaMA, 16 x 8 A800: -33 % memory, -40 % tokens/s"
FROZEN = "report on accelerate 1.10.1, torch 2.6, LoRA"
FP8 = "report on accelerate with TransformerEngine"


def _pool(direction: Direction, why: str, source: str) -> Effect:
    """Return an effect on memory that is reserved and not allocated."""
    return Effect(
        category=RESERVED_UNALLOCATED,
        direction=direction,
        bytes=None,
        phase=None,
        reason=why,
        source=source,
    )


def _allocator(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    before, after = (_expandable(side.value) for side in (change.a, change.b))
    way: Direction = "either" if before == after else "down" if after else "up"
    why = "expandable segments leave few holes: less is reserved and not allocated"
    if before == after:
        why = "fragmentation: reserved, not allocated, memory"
    return (_pool(way, why, ALLOCATOR),)


def _expandable(value: object) -> bool:
    return "expandable_segments:true" in str(value or "").lower().replace(" ", "")


def _record_streams(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    way = opposite(rises(change))
    why = "buffers of collectives are freed at once, not when their stream has passed"
    return (
        _pool(way, why, STREAMS),
        effect(Category.COMMUNICATION, way, why, STREAMS),
    )


def _chunked(change: ConfigChange) -> bool | None:
    """Return whether B computes the loss in chunks where A does not; None: neither or both."""
    before, after = ("chunk" in str(side.value or "") for side in (change.a, change.b))
    return None if before == after else after


def _loss(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    chunked = _chunked(change)
    way: Direction = "either" if chunked is None else "down" if chunked else "up"
    why = "in chunks the logits of a few tokens are there at a time"
    if chunked is None:
        why = "another loss keeps other logits"
    return (
        effect(Category.LOGITS, way, why, CHUNKS),
        effect(Category.TEMPORARIES, "either", "scratch of the loss", CHUNKS),
    )


def _loss_time(change: ConfigChange, context: EffectContext) -> StepTimeEffect:
    chunked = _chunked(change)
    if chunked is None or not context.sharded:
        return StepTimeEffect(direction="either", reason="another loss")
    why = "the head is gathered again for every chunk, unless it stays whole after forward"
    return StepTimeEffect(direction="up" if chunked else "down", reason=why)


def _overlapped(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    way = opposite(rises(change))
    why = "gradients are reduced and divided in every micro batch, not kept whole"
    return (
        effect(Category.GRADIENTS, way, why, OVERLAPPED),
        effect(Category.UNSHARDED_GRADIENTS, way, why, OVERLAPPED),
    )


def _overlapped_time(change: ConfigChange, context: EffectContext) -> StepTimeEffect:  # noqa: ARG001
    why = "a reduction in every micro batch, where accumulation needs one a step"
    return StepTimeEffect(direction=rises(change), reason=why)


def _fp8(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    way = rises(change)
    kept = "TransformerEngine's layers hold their weights in float32 unless told otherwise"
    copies = "8-bit copies of the weights, plain and transposed, stand beside them"
    eight = "8-bit matmuls"
    return (
        effect(Category.PARAMETERS, way, kept, FP8),
        effect(Category.UNSHARDED_PARAMETERS, way, copies, FP8),
        effect(Category.ACTIVATIONS, "either", eight),
        effect(Category.TEMPORARIES, "either", eight),
    )


def frozen_copies(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    """Return what accelerate's FSDP2 does to frozen parameters; FSDP1 casts the trained ones."""
    by_accelerate = context.a.framework == context.b.framework == "accelerate"
    mixed = context.value("precision.compute") in ("bfloat16", "float16")
    if not by_accelerate or not mixed or "ddp" in (change.a.value, change.b.value):
        return ()
    way: Direction = "up" if change.b.value == "fsdp2" else "down"
    why = "with mixed precision frozen parameters too are kept in float32 (seen in 1.10)"
    return (effect(Category.PARAMETERS, way, why, FROZEN),)


RULES: dict[str, EffectRule] = {
    "env.alloc_conf": _allocator,
    "env.TORCH_NCCL_AVOID_RECORD_STREAMS": _record_streams,
    "loss_type": _loss,
    "overlapped_distributed_optimizer": _overlapped,
    "precision.fp8": _fp8,
}
TIMES: dict[str, TimeRule] = {
    "loss_type": _loss_time,
    "overlapped_distributed_optimizer": _overlapped_time,
}
