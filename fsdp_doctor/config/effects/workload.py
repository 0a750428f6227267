"""Batch, sequence, accumulation, recomputation, compilation and the model's shape."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_doctor.config.effects.base import (
    ACTIVATIONS,
    CHECKPOINTING,
    FSDP2_PARAM,
    GUESS,
    ZERO,
    EffectContext,
    EffectRule,
    compare_order,
    computed,
    earlier_gradients,
    effect,
    opposite,
    rises,
)
from fsdp_doctor.config.effects.formulas import is_sharded, waits_for_sync
from fsdp_doctor.model.config import ConfigChange, ConfigValue, Direction, Effect
from fsdp_doctor.model.memory import Category, Phase


def _tokens(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    way = rises(change)
    linear = "proportional to the tokens of a micro batch"
    found = [
        effect(Category.ACTIVATIONS, way, linear, ACTIVATIONS),
        effect(Category.LOGITS, way, linear, ACTIVATIONS),
        effect(Category.TEMPORARIES, way, "scratch of forward and backward follows the tokens"),
        effect(Category.INPUTS, way, linear, GUESS),
    ]
    if change.key == "batch.seq_len":
        found.append(effect(Category.BUFFERS, way, "position tables are as long as the sequence"))
    return tuple(found)


def _accumulation(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    """More than one micro step: what the first leaves behind is there in the next one's peak."""
    started = change.a.value == 1
    if not started and change.b.value != 1:
        return ()
    way: Direction = "up" if started else "down"
    several = context.after if started else context.before
    why = "reduced gradients are added to earlier ones"
    shared = effect(Category.COMMUNICATION, "either", why, FSDP2_PARAM)
    if is_sharded(several) and waits_for_sync(several):
        why = "whole gradients are kept between micro steps (last_microbatch)"
        kept = computed(context, Category.UNSHARDED_GRADIENTS, way, why, FSDP2_PARAM)
        why = "gradients are cast and added to the whole ones"
        return kept, effect(Category.TEMPORARIES, "either", why, FSDP2_PARAM), shared
    why = "a new gradient is added to the old one"
    scratch = effect(Category.TEMPORARIES, way, why, GUESS, phase=Phase.BACKWARD)
    return (*_replica_gradients(way, several, context), scratch, shared)


def _replica_gradients(
    way: Direction, several: Mapping[str, ConfigValue], context: EffectContext
) -> list[Effect]:
    """Gradients of earlier micro steps; with ``gradient_as_bucket_view`` they are always there."""
    view = several.get("comm.bucket_view")
    if view is not None and view.value:
        return []
    return earlier_gradients(way, several, context.sizes_after)


def _recompute(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    if change.key == "recompute.granularity":
        saves = opposite(rises(change))  # every 4th block recomputed saves less than every 2nd
    else:
        saves = _saves_more(change)
    return (
        effect(
            Category.ACTIVATIONS,
            opposite(saves),
            "recomputed blocks keep their input only",
            CHECKPOINTING,
        ),
        effect(
            Category.TEMPORARIES,
            "either",
            "activations of the block being recomputed live in backward",
            CHECKPOINTING,
            phase=Phase.BACKWARD,
        ),
    )


def _saves_more(change: ConfigChange) -> Direction:
    order = ("none", "selective", "full")
    if "every_n" in (change.a.value, change.b.value):
        order = ("none", "every_n", "full")
    return compare_order(change.a.value, change.b.value, order)


def _compiled(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    source = "torch/_functorch/partitioners.py (2.13)"
    why = "the compiler chooses what is saved and fuses the rest"
    categories = (Category.ACTIVATIONS, Category.TEMPORARIES, Category.LOGITS)
    return tuple(effect(category, "either", why, source) for category in categories)


_STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
_GATHERED = (Category.UNSHARDED_PARAMETERS, Category.UNSHARDED_GRADIENTS, Category.COMMUNICATION)


def _model_size(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    way = rises(change)
    if change.key == "model.tied_embeddings":
        way = opposite(way)
    why = "follows the number of parameters"
    found = [computed(context, category, way, why, ZERO) for category in _STATES]
    found += [
        computed(context, category, way, why, ZERO, zero_is_open=True) for category in _GATHERED
    ]
    if change.key == "model.tied_embeddings":
        why = "both uses add to one gradient"
        found.append(effect(Category.TEMPORARIES, "either", why))
        return tuple(found)
    found += _model_compute(change, way)
    why = "scratch of the optimizer step follows the number of parameters"
    found.append(computed(context, Category.TEMPORARIES, way, why, ZERO, phase=Phase.OPTIMIZER))
    return tuple(found)


def _model_compute(change: ConfigChange, way: Direction) -> list[Effect]:
    """Effects of a shape on what forward and backward hold."""
    if change.key == "model.vocab":
        return [
            effect(Category.LOGITS, way, "one logit per token and word", ACTIVATIONS),
            *_scratch(way, "scratch of the loss follows the vocabulary"),
        ]
    found = [effect(Category.ACTIVATIONS, way, "saved per layer and channel", ACTIVATIONS)]
    if change.key != "model.layers":
        found += _scratch(way, "scratch of a block follows its width")
    return found


def _scratch(way: Direction, why: str) -> list[Effect]:
    phases = (Phase.FORWARD, Phase.BACKWARD)
    return [effect(Category.TEMPORARIES, way, why, phase=phase) for phase in phases]


def _heads(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    found = list(_model_size(change, context)) if change.key == "model.kv_heads" else []
    why = "attention keeps one statistic per head and token, and repeats key/value heads"
    found.append(effect(Category.ACTIVATIONS, "either", why, ACTIVATIONS))
    found.append(effect(Category.TEMPORARIES, "either", why, ACTIVATIONS))
    found.append(effect(Category.BUFFERS, "either", "position tables are half a head wide"))
    return tuple(found)


def _other_model(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    why = "another model"
    found = [computed(context, category, "either", why, ZERO) for category in _STATES]
    rest = (
        *_GATHERED,
        Category.ACTIVATIONS,
        Category.LOGITS,
        Category.TEMPORARIES,
        Category.INPUTS,
        Category.BUFFERS,
    )
    return (*found, *(effect(category, "either", why) for category in rest))


def _other_loss(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    categories = (Category.LOGITS, Category.ACTIVATIONS, Category.TEMPORARIES)
    return tuple(effect(category, "either", "another loss function") for category in categories)


def _other_batch(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    categories = (
        Category.INPUTS,
        Category.ACTIVATIONS,
        Category.LOGITS,
        Category.TEMPORARIES,
    )
    return tuple(effect(category, "either", "another input") for category in categories)


RULES: dict[str, EffectRule] = {
    "batch.micro": _tokens,
    "batch.seq_len": _tokens,
    "batch.accumulation": _accumulation,
    "recompute.mode": _recompute,
    "recompute.granularity": _recompute,
    "compile.enabled": _compiled,
    "model.layers": _model_size,
    "model.hidden": _model_size,
    "model.ffn": _model_size,
    "model.vocab": _model_size,
    "model.tied_embeddings": _model_size,
    "model.heads": _heads,
    "model.kv_heads": _heads,
    "model.factory": _other_model,
    "model.kwargs": _other_model,
    "model.loss": _other_loss,
    "model.batch": _other_batch,
}
