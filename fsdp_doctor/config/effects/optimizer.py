"""The optimizer's state and scratch."""

from __future__ import annotations

from fsdp_doctor.config.effects.base import (
    FSDP1,
    OPTIM,
    EffectContext,
    EffectRule,
    compare_order,
    computed,
    effect,
    rises,
)
from fsdp_doctor.model.config import ConfigChange, Direction, Effect
from fsdp_doctor.model.memory import Category, Phase


def _scratch(context: EffectContext, way: Direction, why: str) -> Effect:
    return computed(context, Category.TEMPORARIES, way, why, OPTIM, phase=Phase.OPTIMIZER)


def _kind(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    way: Direction = "up" if change.b.value == "adamw" else "down"
    why = "AdamW keeps two moments per parameter, SGD one with momentum and none without"
    return (
        computed(context, Category.OPTIMIZER_STATE, way, why, OPTIM),
        _scratch(context, "either", "AdamW needs a square root per parameter, SGD the decay"),
    )


def _momentum(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    if bool(change.a.value) == bool(change.b.value):
        return ()
    why = "SGD with momentum keeps one buffer per parameter"
    return (computed(context, Category.OPTIMIZER_STATE, rises(change), why, OPTIM),)


def _implementation(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    words = {change.a.value, change.b.value}
    if words == {"default", "foreach"}:
        why = "the same on a GPU; on a CPU the default is for_loop"
        return (effect(Category.TEMPORARIES, "either", why, OPTIM, phase=Phase.OPTIMIZER),)
    if words == {"default", "for_loop"}:
        why = "the same on a CPU; on a GPU the default is foreach, with scratch for all parameters"
    else:
        why = "foreach makes scratch for all parameters at once, for_loop for one, fused none"
    order = ("fused", "for_loop", "default", "foreach")
    return (_scratch(context, compare_order(change.a.value, change.b.value, order), why),)


def _weight_decay(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    if not sgd_decay_changes(change, context):
        return ()
    return (_scratch(context, rises(change), "SGD adds the decay to a copy of the gradients"),)


def sgd_decay_changes(change: ConfigChange, context: EffectContext) -> bool:
    """Return whether weight decay goes on or off under SGD, the only case that needs memory."""
    switched = bool(change.a.value) != bool(change.b.value)
    return switched and context.either_side("optimizer.kind", "sgd")


def _clip(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    if change.a.set == change.b.set:
        return ()
    way: Direction = "up" if change.b.set else "down"
    why = "one norm per parameter, a few bytes each"
    source = "torch/nn/utils/clip_grad.py (2.13)"
    return (effect(Category.TEMPORARIES, way, why, source, phase=Phase.OPTIMIZER),)


def _orig_params(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    why = "the optimizer sees single parameters instead of flat ones"
    return (
        effect(Category.TEMPORARIES, "either", why, FSDP1, phase=Phase.OPTIMIZER),
        effect(Category.OPTIMIZER_STATE, "either", "rounding per parameter", FSDP1),
    )


RULES: dict[str, EffectRule] = {
    "optimizer.kind": _kind,
    "optimizer.momentum": _momentum,
    "optimizer.implementation": _implementation,
    "optimizer.weight_decay": _weight_decay,
    "optimizer.grad_clip": _clip,
    "fsdp1.use_orig_params": _orig_params,
}
