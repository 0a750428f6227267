"""What a change of a field does to a Megatron job's memory.

Each field names the categories that it can move, the way in which it moves them and why. Bytes are
the difference of the closed forms of ``megatron_memory`` where these cover the category; where they
come to nothing, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdp_doctor.config.effects.base import (
    EffectContext,
    EffectRule,
    compare_order,
    effect,
    opposite,
    rises,
)
from fsdp_doctor.config.effects.megatron_memory import estimate
from fsdp_doctor.config.sizes import DTYPE_BYTES
from fsdp_doctor.model.config import ConfigChange, Direction, Effect
from fsdp_doctor.model.memory import Category, Phase

ENGINES = frozenset({"megatron_ddp", "megatron_distopt", "megatron_fsdp", "mcore_torch_fsdp2"})
"""Values of ``sharding.impl`` whose fields are told here."""
FORMS = "closed forms: megatron-core 0.16-0.19, docs/api-guide/dist_optimizer.md"
ACTIVATION_FORMS = "Korthikanti et al. 2022, arXiv:2205.05198, tables 1 and 2"
FSDP = "megatron/core/distributed/fsdp/src/megatron_fsdp (megatron-core 0.16-0.19)"
DDP = "megatron/core/distributed/param_and_grad_buffer.py (megatron-core 0.16-0.19)"
CORE = "megatron/core/transformer/transformer_config.py (megatron-core 0.12-0.19)"
LOSS = "megatron/core/tensor_parallel/cross_entropy.py (megatron-core 0.16-0.19)"

Way = Direction | Callable[[ConfigChange], Direction]


@dataclass(frozen=True, slots=True)
class Says:
    """What a field does to one category."""

    category: Category
    way: Way
    reason: str
    source: str = FORMS
    phase: Phase | None = None
    formed: bool = True
    """Whether the closed forms cover it: no bytes then means no effect."""


def is_megatron(context: EffectContext) -> bool:
    """Return whether Megatron wraps the model on either side."""
    return any(
        field is not None and field.value in ENGINES
        for field in (side.fields.get("sharding.impl") for side in (context.a, context.b))
    )


def rule(*says: Says) -> EffectRule:
    """Return the rule that tells ``says``, with bytes where they are known."""

    def apply(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
        before, after = estimate(context.before), estimate(context.after)
        found = (_told(one, change, before, after) for one in says)
        return tuple(one for one in found if one is not None)

    return apply


def _told(
    says: Says,
    change: ConfigChange,
    before: dict[Category, int | None],
    after: dict[Category, int | None],
) -> Effect | None:
    way = says.way(change) if callable(says.way) else says.way
    a, b = before.get(says.category), after.get(says.category)
    if not says.formed or a is None or b is None:
        return effect(says.category, way, says.reason, says.source, phase=says.phase)
    if a == b:
        return None
    way = "up" if b > a else "down"
    return effect(says.category, way, says.reason, says.source, phase=says.phase, amount=b - a)


def falls(change: ConfigChange) -> Direction:
    """Return the other way than a number moves."""
    return opposite(rises(change))


def widens(change: ConfigChange) -> Direction:
    """Return ``up`` where a dtype becomes wider."""
    widths = {**DTYPE_BYTES, "fp8": 1, "none": 0}
    a, b = widths.get(str(change.a.value)), widths.get(str(change.b.value))
    if a is None or b is None:
        return "either"
    return "up" if b > a else "down" if b < a else "none"


def ordered(*order: object) -> Callable[[ConfigChange], Direction]:
    """Return the way in which a word moves in ``order``, least memory first."""

    def way(change: ConfigChange) -> Direction:
        return compare_order(change.a.value, change.b.value, order)

    return way


def switched_on(change: ConfigChange) -> Direction:
    """Return ``up`` where something is set that was off, ``none`` between two settings."""
    off: tuple[object, ...] = (None, False, "none", 0, [])
    a, b = change.a.value in off, change.b.value in off
    return "none" if a == b else "down" if b else "up"


def switched_off(change: ConfigChange) -> Direction:
    """Return the other way than ``switched_on``."""
    return opposite(switched_on(change))


def states(way: Way, reason: str) -> tuple[Says, ...]:
    """Return what moves with the parameters that a rank holds."""
    held = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
    in_flight = (Category.UNSHARDED_PARAMETERS, Category.UNSHARDED_GRADIENTS)
    found = [Says(category, way, reason) for category in held]
    return (*found, *(Says(c, "either", reason, FSDP) for c in in_flight))


def activations(way: Way, reason: str) -> Says:
    """Return what moves with the activations saved for backward."""
    return Says(Category.ACTIVATIONS, way, reason, ACTIVATION_FORMS)


def logits(way: Way, reason: str) -> Says:
    """Return what moves with the logits and the loss."""
    return Says(Category.LOGITS, way, reason, LOSS)


def scratch(way: Way, reason: str, source: str = CORE) -> Says:
    """Return what moves with scratch memory of forward and backward."""
    return Says(Category.TEMPORARIES, way, reason, source, formed=False)


def buffers(way: Way, reason: str, source: str = DDP) -> Says:
    """Return what moves with communication buffers."""
    return Says(Category.COMMUNICATION, way, reason, source, formed=False)
