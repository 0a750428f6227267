"""Which changed fields can have moved a memory category, judged by their known effects."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fsdp_doctor.model.config import ConfigChange, Effect

POOL_CATEGORIES = frozenset({"reserved_unallocated", "outside_pytorch"})
"""What lies outside the allocated bytes."""
TOLERANCE_SHARE = 0.03
TOLERANCE_BYTES = 1 << 20
TOLERANCE_SMALL_SHARE = 0.1
"""A formula agrees within 3 % of the measured change, or within 1 MiB where that is at most a
tenth of it: in small runs 1 MiB would confirm anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A changed field that can touch a category."""

    key: str
    predicted: int | None
    """Signed bytes by formula; None: no formula, or its phases disagree."""
    opposing: bool
    """Whether all its effects point against the measured sign."""
    reason: str
    sources: tuple[str, ...] = ()
    """Where its effects are known from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The fields a category's change is put down to; none: unexplained."""

    keys: tuple[str, ...] = ()
    level: int | None = None
    predicted: int | None = None
    reason: str = ""
    sources: tuple[str, ...] = ()


def agrees(predicted: int | None, measured: int) -> bool:
    """Return whether a formula's bytes match the measured ones, in sign and in size."""
    if not predicted or (predicted > 0) != (measured > 0):
        return False
    return within_tolerance(predicted, measured, abs(measured))


def within_tolerance(predicted: int, measured: int, scale: int) -> bool:
    """Return whether two changes are equal within the tolerance of a change of ``scale`` bytes."""
    small = min(float(TOLERANCE_BYTES), TOLERANCE_SMALL_SHARE * scale)
    return abs(predicted - measured) <= max(TOLERANCE_SHARE * scale, small)


def find_candidate(
    change: ConfigChange, category: str | None, phases: Collection[str] | None, delta: int
) -> Candidate | None:
    """Return how ``change`` can touch ``category`` in one of ``phases`` (None: any), or None.

    Category None stands for allocated memory that is not divided into categories.
    """
    effects = [e for e in change.effects if _applies(e, category, phases)]
    if not effects:
        return None
    return Candidate(
        key=change.key,
        predicted=_predicted(effects),
        opposing=all(_opposes(e, delta) for e in effects),
        reason=effects[0].reason,
        sources=tuple(dict.fromkeys(e.source for e in effects)),
    )


def _applies(effect: Effect, category: str | None, phases: Collection[str] | None) -> bool:
    if effect.direction == "none" or effect.bytes == 0:
        return False
    if category is None:
        if effect.category in POOL_CATEGORIES:
            return False
    elif effect.category != category:
        return False
    return effect.phase is None or phases is None or effect.phase in phases


def _opposes(effect: Effect, delta: int) -> bool:
    if effect.direction == "either":
        return effect.bytes is not None and (effect.bytes > 0) != (delta > 0)
    return (effect.direction == "up") != (delta > 0)


def _predicted(effects: Sequence[Effect]) -> int | None:
    """Return the bytes by formula: effects of one phase add up, phases must agree."""
    sums: dict[str | None, int] = {}
    for effect in effects:
        if effect.bytes is None:
            return None
        sums[effect.phase] = sums.get(effect.phase, 0) + effect.bytes
    values = set(sums.values())
    return values.pop() if len(values) == 1 else None


def blame(
    changes: Sequence[ConfigChange],
    category: str | None,
    phases: Collection[str] | None,
    delta: int,
) -> Blame:
    """Put a category's change down to one field, to several jointly, or to none.

    The measured change is the net of all fields that touch the category, those that work against
    it among them; nothing measured here says how to divide it, so several fields stay together.
    Fields that all contradict the measured sign explain nothing.
    """
    found = [
        candidate
        for change in changes
        if (candidate := find_candidate(change, category, phases, delta)) is not None
    ]
    if all(candidate.opposing for candidate in found):
        return Blame(reason=_why_nothing(found, delta))
    if len(found) == 1:
        only = found[0]
        return Blame(
            keys=(only.key,),
            level=1 if agrees(only.predicted, delta) else 0,
            predicted=only.predicted,
            reason=only.reason,
            sources=only.sources,
        )
    against = [candidate.key for candidate in found if candidate.opposing]
    but = f" ({', '.join(against)} works against the others)" if against else ""
    return Blame(
        keys=tuple(candidate.key for candidate in found),
        level=0,
        predicted=_total(found),
        reason="; ".join(f"{c.key}: {c.reason}" for c in found) + but,
        sources=tuple(dict.fromkeys(source for c in found for source in c.sources)),
    )


def _total(candidates: Sequence[Candidate]) -> int | None:
    values = [c.predicted for c in candidates if c.predicted is not None]
    return sum(values) if len(values) == len(candidates) else None


def _why_nothing(found: Sequence[Candidate], delta: int) -> str:
    if not found:
        return "no changed field is known to touch it"
    keys = ", ".join(candidate.key for candidate in found)
    return f"{keys} can touch it, but would {'lower' if delta > 0 else 'raise'} it"
