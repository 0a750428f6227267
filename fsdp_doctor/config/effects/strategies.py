"""Engines and ZeRO-like strategies of all frameworks; which states are in host memory."""

from __future__ import annotations

from fsdp_doctor.config.effects import communication, sharding
from fsdp_doctor.config.effects.base import (
    FSDP2_PARAM,
    GUESS,
    ZERO,
    EffectContext,
    EffectRule,
    TimeRule,
    compare_order,
    computed,
    effect,
    opposite,
    rises,
)
from fsdp_doctor.model.config import ConfigChange, Direction, Effect, StepTimeEffect
from fsdp_doctor.model.memory import Category, Phase

ORDER = ("none", "optim", "optim_grads", "optim_grads_params")
_TORCH = frozenset({"none", "ddp", "fsdp1", "fsdp2"})
_DIVIDED = (
    (Category.OPTIMIZER_STATE, 1, "the optimizer steps on 1/N"),
    (Category.GRADIENTS, 2, "gradients are kept as 1/N after reduction"),
    (Category.PARAMETERS, 3, "parameters are kept as 1/N"),
)


def _engine(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    if {change.a.value, change.b.value} <= _TORCH:
        return sharding.RULES["sharding.impl"](change, context)
    why = "another engine: other buffers, padding and copies"
    categories = (Category.COMMUNICATION, Category.TEMPORARIES, Category.OPTIMIZER_STATE)
    return tuple(effect(category, "either", why, GUESS) for category in categories)


def _strategy(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    engines = {context.value("sharding.impl"), context.value_before("sharding.impl")}
    if engines <= _TORCH:
        return sharding.RULES["sharding.strategy"](change, context)
    before, after = change.a.value, change.b.value
    if before not in ORDER or after not in ORDER:
        return ()
    levels = sorted((ORDER.index(before), ORDER.index(after)))
    way: Direction = "down" if ORDER.index(after) > ORDER.index(before) else "up"
    found = [
        computed(context, category, way, why, ZERO)
        for category, level, why in _DIVIDED
        if levels[0] < level <= levels[1]
    ]
    if levels[1] == 3:
        why = "parameters are gathered for compute, a module at a time"
        found.append(effect(Category.UNSHARDED_PARAMETERS, opposite(way), why, ZERO))
    why = "gather and reduce buffers of another kind"
    found.append(effect(Category.COMMUNICATION, "either", why, GUESS))
    return tuple(found)


def _bucket(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    """DeepSpeed keeps buffers of a bucket's size; DDP's buckets are the gradients themselves."""
    if "deepspeed" not in (context.value("sharding.impl"), context.value_before("sharding.impl")):
        return communication.RULES["comm.bucket_bytes"](change, context)
    numbers = all(isinstance(side.value, int) for side in (change.a, change.b))
    source = "deepspeed/runtime/zero/stage_1_and_2.py, stage3.py (0.19)"
    why = "a buffer of this size, two with overlap"
    return (effect(Category.COMMUNICATION, rises(change) if numbers else "either", why, source),)


_OFFLOADED: dict[str, tuple[Category, str]] = {
    "offload.params": (Category.PARAMETERS, "the sharded parameters are in host memory"),
    "offload.grads": (Category.GRADIENTS, "reduced gradients are copied to the host"),
    "offload.optimizer": (Category.OPTIMIZER_STATE, "the optimizer's state is in host memory"),
}
"""Field -> category that leaves the device, and why."""


def _offload(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    """Return effects of a state, and of those that follow it, moving to or from the host."""
    way: Direction = "up" if context.value(change.key) in (None, "none") else "down"
    found = []
    for key, (category, why) in _OFFLOADED.items():
        moves = context.value(key) != context.value_before(key)
        if key == change.key or (change.key == "offload.params" and moves):
            found.append(computed(context, category, way, why, FSDP2_PARAM))
    if change.key == "offload.grads":
        return tuple(found)
    why = "the optimizer's scratch is in host memory"
    if context.value("offload.optimizer") != context.value_before("offload.optimizer"):
        phase = Phase.OPTIMIZER
        found.append(computed(context, Category.TEMPORARIES, way, why, FSDP2_PARAM, phase=phase))
    why = "shards are copied to the device before a gather, gradients from it after a reduce"
    found.append(effect(Category.COMMUNICATION, "either", why, FSDP2_PARAM))
    return tuple(found)


def _activations(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    way: Direction = "up" if change.b.value in (None, "none") else "down"
    why = "what forward saves for backward is copied to the host"
    return (effect(Category.ACTIVATIONS, way, why, GUESS),)


def _slower(reason: str) -> TimeRule:
    def rule(change: ConfigChange, context: EffectContext) -> StepTimeEffect:  # noqa: ARG001
        away = change.b.value in (None, "none")
        return StepTimeEffect(direction="down" if away else "up", reason=reason)

    return rule


def _strategy_time(change: ConfigChange, context: EffectContext) -> StepTimeEffect:  # noqa: ARG001
    levels = ("none", "optim", "optim_grads"), ("optim_grads_params",)
    groups = [1 if v in levels[1] else 0 for v in (change.a.value, change.b.value)]
    way = compare_order(groups[0], groups[1], (0, 1))
    why = "sharded parameters are gathered in forward and in backward"
    if groups[0] == groups[1]:
        way, why = "either", "an all-reduce becomes a reduce-scatter and an all-gather"
    return StepTimeEffect(direction=way, reason=why)


RULES: dict[str, EffectRule] = {
    "sharding.impl": _engine,
    "sharding.strategy": _strategy,
    "comm.bucket_bytes": _bucket,
    "offload.params": _offload,
    "offload.grads": _offload,
    "offload.optimizer": _offload,
    "offload.activations": _activations,
}
TIMES: dict[str, TimeRule] = {
    "sharding.strategy": _strategy_time,
    "offload.grads": _slower("gradients are copied over PCIe each step"),
    "offload.optimizer": _slower("the optimizer runs on the CPU, or its state is copied each step"),
    "offload.activations": _slower("activations are copied over PCIe and back, partly hidden"),
}
