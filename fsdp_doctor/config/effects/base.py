"""What the files of this package share: the context of a change, and how effects are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.config.effects.formulas import category_bytes, is_sharded
from fsdp_doctor.model.config import (
    ConfigChange,
    ConfigValue,
    Direction,
    Effect,
    EffectiveConfig,
    StepTimeEffect,
)
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.model.run import ModelSizes

DDP = "torch/nn/parallel/distributed.py (2.13)"
FSDP1 = "torch/distributed/fsdp/_runtime_utils.py (2.13)"
FSDP2 = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (2.13)"
FSDP2_PARAM = "torch/distributed/fsdp/_fully_shard/_fsdp_param.py (2.13)"
OPTIM = "torch/optim/adamw.py, adam.py, sgd.py (2.13)"
ZERO = "ZeRO, Rajbhandari et al. 2020, arXiv:1910.02054"
CHECKPOINTING = "Chen et al. 2016, arXiv:1604.06174"
ACTIVATIONS = "Korthikanti et al. 2022, arXiv:2205.05198"
AUTOCAST = "torch/amp/autocast_mode.py (2.13)"
GUESS = "sign only, by mechanism; no formula"


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectContext:
    """One change between two configs, with what is known of the models."""

    a: EffectiveConfig
    b: EffectiveConfig
    before: Mapping[str, ConfigValue]
    """A's fields, with the changes listed earlier taken from B."""
    after: Mapping[str, ConfigValue]
    """``before`` with this change, and what follows from it, taken from B. Bytes are the difference
    from ``before`` to ``after``, so the bytes of all changes add up.
    """
    sizes_before: ModelSizes | None = None
    sizes_after: ModelSizes | None = None

    @property
    def sharded(self) -> bool:
        """Whether the engine gathers parameters on either side."""
        return is_sharded(self.a.fields) or is_sharded(self.b.fields)

    def value(self, key: str) -> Any:
        """Return a field after the change; None when there is none or it is inert."""
        return _effective_value(self.after, key)

    def value_before(self, key: str) -> Any:
        """Return a field before the change; None when there is none or it is inert."""
        return _effective_value(self.before, key)

    def either_side(self, key: str, value: Any) -> bool:
        """Return whether a field has ``value`` before or after the change."""
        return value in (self.value(key), self.value_before(key))

    def delta(self, category: Category) -> int | None:
        """Return the signed bytes that the change makes to a category, or None when unknown."""
        before = category_bytes(category, self.before, self.sizes_before)
        after = category_bytes(category, self.after, self.sizes_after)
        return None if before is None or after is None else after - before


def _effective_value(fields: Mapping[str, ConfigValue], key: str) -> Any:
    field = fields.get(key)
    return field.value if field is not None and field.effective else None


EffectRule = Callable[[ConfigChange, EffectContext], tuple[Effect, ...]]
TimeRule = Callable[[ConfigChange, EffectContext], StepTimeEffect | None]


def effect(
    category: Category,
    direction: Direction,
    reason: str,
    source: str = GUESS,
    *,
    phase: Phase | None = None,
    amount: int | None = None,
) -> Effect:
    """Return an effect; ``amount`` is in bytes, ``phase`` None when several phases show it."""
    return Effect(
        category=str(category),
        direction=direction,
        bytes=amount,
        phase=None if phase is None else str(phase),
        reason=reason,
        source=source,
    )


def computed(
    context: EffectContext,
    category: Category,
    fallback: Direction,
    reason: str,
    source: str,
    *,
    phase: Phase | None = None,
    zero_is_open: bool = False,
) -> Effect:
    """Return an effect with its bytes by formula, or with the direction ``fallback`` alone.

    ``zero_is_open``: the formula covers one moment of the step only, so 0 there does not rule out
    an effect elsewhere.
    """
    amount = context.delta(category)
    if amount is None or (amount == 0 and zero_is_open):
        return effect(category, fallback, reason, source, phase=phase)
    direction: Direction = "up" if amount > 0 else "down" if amount < 0 else "none"
    return effect(category, direction, reason, source, phase=phase, amount=amount)


def earlier_gradients(
    way: Direction, fields: Mapping[str, ConfigValue], sizes: ModelSizes | None
) -> list[Effect]:
    """Return the effects of reduced gradients that come or go during further micro steps."""
    amount = category_bytes(Category.GRADIENTS, fields, sizes)
    if amount is not None and way == "down":
        amount = -amount
    why = "gradients of earlier micro steps are there during the next one"
    if way == "down":
        why = "no reduced gradient of an earlier micro step is there during another one"
    phases = (Phase.FORWARD, Phase.BACKWARD)
    return [effect(Category.GRADIENTS, way, why, ZERO, phase=p, amount=amount) for p in phases]


def opposite(direction: Direction) -> Direction:
    """Return the other way for ``up`` and ``down``; the others stay."""
    turned: dict[Direction, Direction] = {"up": "down", "down": "up"}
    return turned.get(direction, direction)


def rises(change: ConfigChange) -> Direction:
    """Return which way a number moves from A to B; a switch counts as 0 and 1, unset as 0."""
    if isinstance(change.a.value, str) or isinstance(change.b.value, str):
        return "either"
    a = change.a.value if isinstance(change.a.value, (int, float)) else 0
    b = change.b.value if isinstance(change.b.value, (int, float)) else 0
    return "up" if b > a else "down" if b < a else "either"


def compare_order(a: Any, b: Any, order: tuple[Any, ...]) -> Direction:
    """Return which way a word moves in ``order`` (smallest first); ``either`` when not in it."""
    if a not in order or b not in order:
        return "either"
    before, after = order.index(a), order.index(b)
    return "up" if after > before else "down" if after < before else "either"
