"""What a change of a field does to memory and step time: knowledge, one file per group of fields.

An effect names a category, a direction, bytes per rank where a formula gives them, and its source.
A field lists every category that it can change by a mechanism, and no other.
"""

from __future__ import annotations

from fsdp_doctor.config.effects import (
    communication,
    megatron_rules,
    megatron_shape_rules,
    megatron_times,
    native,
    optimizer,
    precision,
    reported,
    sharding,
    strategies,
    workload,
)
from fsdp_doctor.config.effects.base import EffectContext, EffectRule, TimeRule
from fsdp_doctor.config.effects.irrelevant import is_irrelevant
from fsdp_doctor.config.effects.megatron import is_megatron
from fsdp_doctor.config.effects.native_names import without_effect
from fsdp_doctor.config.effects.optimizer import sgd_decay_changes
from fsdp_doctor.config.effects.step_time import TIMES
from fsdp_doctor.model.config import ConfigChange, Effect, StepTimeEffect

NO_EFFECT = frozenset(
    {
        "name",
        "seed",
        "optimizer.learning_rate",
        "steps.warmup",
        "steps.timed",
        "steps.kernel_profile",
    }
)
"""Fields that change neither memory nor the time of a step."""

_RULES: dict[str, EffectRule] = {
    **native.RULES,
    **reported.RULES,
    **sharding.RULES,
    **communication.RULES,
    **precision.RULES,
    **workload.RULES,
    **optimizer.RULES,
    **strategies.RULES,
}
_TIMES: dict[str, TimeRule] = {**native.TIMES, **reported.TIMES, **TIMES, **strategies.TIMES}
_MEGATRON: dict[str, EffectRule] = {**megatron_rules.RULES, **megatron_shape_rules.RULES}
"""Rules that hold where Megatron wraps the model, before those above."""


def is_known(key: str) -> bool:
    """Return whether this package knows what a field does."""
    return key in _RULES or key in _MEGATRON or key in NO_EFFECT


def has_no_effect(change: ConfigChange, context: EffectContext) -> bool:
    """Return whether a change moves neither memory nor step time."""
    if change.key == "optimizer.weight_decay":
        return is_megatron(context) or not sgd_decay_changes(change, context)
    if change.key in _RULES or change.key in _MEGATRON:
        return False
    known = change.key in NO_EFFECT or without_effect(change.key) or is_irrelevant(change.key)
    return known or _is_new_default(change)


def _is_new_default(change: ConfigChange) -> bool:
    """Return whether one version lacks a setting that the other leaves at its default."""
    alone = not change.a.native or not change.b.native
    return alone and change.a.source == change.b.source == "default"


def effects_of(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    """Return what a change does to each memory category; empty when nothing, or not known."""
    first, second = (_MEGATRON, _RULES) if is_megatron(context) else (_RULES, _MEGATRON)
    rule = first.get(change.key) or second.get(change.key)
    return () if rule is None else rule(change, context)


def step_time_of(change: ConfigChange, context: EffectContext) -> StepTimeEffect | None:
    """Return in which direction a change moves step time, or None when not known."""
    first, second = _TIMES, megatron_times.TIMES
    if is_megatron(context):
        first, second = second, first
    rule = first.get(change.key) or second.get(change.key)
    return None if rule is None else rule(change, context)


__all__ = [
    "NO_EFFECT",
    "EffectContext",
    "effects_of",
    "has_no_effect",
    "is_known",
    "step_time_of",
]
