"""Dtypes: stored, computed, reduced, autocast; the gradient scaler."""

from __future__ import annotations

from fsdp_doctor.config.effects.base import (
    AUTOCAST,
    FSDP1,
    FSDP2_PARAM,
    GUESS,
    OPTIM,
    EffectContext,
    EffectRule,
    compare_order,
    computed,
    effect,
    opposite,
)
from fsdp_doctor.config.sizes import DTYPE_BYTES
from fsdp_doctor.model.config import ConfigChange, Direction, Effect
from fsdp_doctor.model.memory import Category, Phase

_BY_WIDTH = "sign only: bytes are proportional to the element's width"


def _widens(change: ConfigChange) -> Direction:
    return compare_order(
        DTYPE_BYTES.get(str(change.a.value)), DTYPE_BYTES.get(str(change.b.value)), (2, 4)
    )


def _storage(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    way = _widens(change)
    found = [
        computed(context, Category.PARAMETERS, way, "bytes per stored element", OPTIM),
        computed(context, Category.GRADIENTS, way, "gradients have the stored dtype", OPTIM),
        computed(context, Category.OPTIMIZER_STATE, way, "state has the stored dtype", OPTIM),
        computed(
            context,
            Category.TEMPORARIES,
            way,
            "the optimizer's scratch has the stored dtype",
            OPTIM,
            phase=Phase.OPTIMIZER,
        ),
        effect(Category.COMMUNICATION, way, "buffers hold stored or computed elements", GUESS),
    ]
    if context.value("precision.compute") != context.value_before("precision.compute"):
        found += _computed_in(way, context)
        phases = (Phase.FORWARD, Phase.BACKWARD)
        why = "scratch of compute"
        found += [effect(Category.TEMPORARIES, way, why, phase=p) for p in phases]
    elif context.either_side("precision.autocast", "bfloat16") or context.sharded:
        why = "a copy in the computed dtype is needed only where it differs from the stored one"
        found.append(effect(Category.UNSHARDED_PARAMETERS, "either", why, GUESS))
    return tuple(found)


def _computed_in(way: Direction, context: EffectContext) -> list[Effect]:
    """Effects of the dtype that forward and backward run in."""
    found = [
        effect(Category.ACTIVATIONS, way, "saved in the computed dtype", _BY_WIDTH),
        effect(Category.LOGITS, way, "logits come in the computed dtype", _BY_WIDTH),
    ]
    if context.sharded:
        why = "gathered in the computed dtype"
        found.append(
            computed(
                context, Category.UNSHARDED_PARAMETERS, way, why, FSDP2_PARAM, zero_is_open=True
            )
        )
        why = "whole gradients come in the computed dtype"
        found.append(
            computed(
                context, Category.UNSHARDED_GRADIENTS, way, why, FSDP2_PARAM, zero_is_open=True
            )
        )
    return found


def _compute(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    way = _widens(change)
    return (
        *_computed_in(way, context),
        effect(Category.COMMUNICATION, way, "gathers run in the computed dtype", FSDP2_PARAM),
        effect(Category.TEMPORARIES, way, "scratch of forward and backward, casts included"),
    )


def _reduce(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    way = _widens(change)
    return (
        effect(Category.COMMUNICATION, way, "gradients are reduced in this dtype", FSDP2_PARAM),
        computed(
            context,
            Category.UNSHARDED_GRADIENTS,
            way,
            "whole gradients kept between micro steps have this dtype",
            FSDP2_PARAM,
            phase=Phase.BACKWARD,
        ),
        effect(
            Category.TEMPORARIES,
            "either",
            "casts before and after the reduction",
            FSDP1,
            phase=Phase.BACKWARD,
        ),
    )


def _autocast(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    low = change.b.value != "none"
    both = low and change.a.value != "none"
    copies: Direction = "either" if both else "up" if low else "down"
    saved: Direction = opposite(copies)
    why = "weights of linear layers have a low-precision copy until their backward"
    return (
        computed(context, Category.UNSHARDED_PARAMETERS, copies, why, AUTOCAST, zero_is_open=True),
        effect(Category.ACTIVATIONS, saved, "matmul results are in the autocast dtype", AUTOCAST),
        effect(Category.LOGITS, saved, "the head is a matmul in the autocast dtype", AUTOCAST),
        effect(Category.TEMPORARIES, "either", "smaller scratch, but casts between", AUTOCAST),
        effect(
            Category.UNSHARDED_GRADIENTS,
            "either",
            "gradients of the copies are cast back to the weights' dtype",
            AUTOCAST,
            phase=Phase.BACKWARD,
        ),
    )


def _output(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    why = "each unit's output is cast to this dtype"
    categories = (Category.LOGITS, Category.ACTIVATIONS, Category.TEMPORARIES)
    way = _widens(change)
    return tuple(effect(category, way, why, FSDP2_PARAM) for category in categories)


def _cast_inputs(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    why = "inputs of each unit are cast, or not, to the computed dtype"
    return (
        effect(Category.ACTIVATIONS, "either", why, FSDP2_PARAM),
        effect(Category.TEMPORARIES, "either", why, FSDP2_PARAM),
    )


def _buffer(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    way = _widens(change)
    return (
        effect(Category.BUFFERS, way, "buffers are cast to this dtype", FSDP1),
        effect(Category.ACTIVATIONS, "either", "what is computed with buffers", GUESS),
    )


def _keep_low(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    way: Direction = "down" if change.b.value else "up"
    why = "sharded gradients stay in the computed dtype for the optimizer"
    return (
        computed(context, Category.GRADIENTS, way, why, FSDP1),
        effect(Category.TEMPORARIES, "either", "casts of the gradients", FSDP1),
    )


def _scaler(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    source = "torch/amp/grad_scaler.py (2.13)"
    why = "gradients are unscaled in place; flags are a few bytes"
    return (effect(Category.TEMPORARIES, "either", why, source, phase=Phase.OPTIMIZER),)


RULES: dict[str, EffectRule] = {
    "precision.param_storage": _storage,
    "precision.compute": _compute,
    "precision.reduce": _reduce,
    "precision.autocast": _autocast,
    "precision.output": _output,
    "precision.cast_inputs": _cast_inputs,
    "precision.buffer": _buffer,
    "precision.grad_scaler": _scaler,
    "fsdp1.keep_low_precision_grads": _keep_low,
}
