"""Memory limits that let a job fail in the phase that is meant to fail.

What a phase has allocated at its peak has to be there: below that it fails for certain. What it
has reserved need not: PyTorch gives free segments back and tries again before it fails. So the
limit lies below the peak of allocated memory of the phase meant, and, where there is room, above
all that was reserved before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cases import ANY, OomCase

Phases = Sequence[dict[str, Any]]
LEAK_PART = 0.75
"""Part of a leaking run's steps after which it fails."""
LEAST_STEPS = 6
"""Steps that a leaking run has to make before it fails."""


@dataclass(slots=True)
class Window:
    """Limits between which the one sought lies."""

    index: int
    """Number of phases that are done before the one meant."""
    low: int
    high: int


def window(phases: Phases, case: OomCase) -> Window | None:
    """Return the widest window in which the phase meant fails first; None: there is none."""
    if case.phase == ANY:
        return _late_step(phases)
    if case.fault == "fragmentation":  # what is wanting there is a segment, not memory
        return _segment(phases, case)
    found: Window | None = None
    for index, entry in enumerate(phases):
        before = phases[:index]
        if entry["phase"] != case.phase or not before or case.step not in (None, entry["step"]):
            continue
        low = max(done["allocated"] for done in before)
        reserved = max(done["reserved"] for done in before)
        high = entry["allocated"]
        if reserved < high - (high - low) // 4:
            low = reserved
        if found is None or high - low > found.high - found.low:
            found = Window(index, low, high)
    return found if found is not None and found.high > found.low else None


def _late_step(phases: Phases) -> Window | None:
    """A limit that a leak reaches late: the peak of a step at three quarters of the run."""
    if not phases:
        return None
    step = int(phases[-1]["step"] * LEAK_PART)
    index = next(i for i, entry in enumerate(phases) if entry["step"] == step)
    peak = max(entry["allocated"] for entry in phases if entry["step"] == step)
    return Window(index, peak, max(entry["allocated"] for entry in phases))


def _segment(phases: Phases, case: OomCase) -> Window | None:
    index = next((i for i, entry in enumerate(phases) if entry["phase"] == case.phase), None)
    if index is None:
        return None
    low = max(phases[index - 1]["reserved"], *(done["allocated"] for done in phases[:index]))
    high = phases[index]["reserved"]
    return Window(index, low, high) if high > low else None


def limit_in(found: Window, aim: float) -> int:
    """Return the limit at ``aim`` (0 to 1) of a window."""
    return int(found.low + aim * (found.high - found.low))


def as_meant(case: OomCase, found: Window | None, truth: dict[str, Any]) -> bool:
    """Whether a job failed where it should."""
    if found is None or case.alone:
        return True
    if case.phase == ANY:
        return bool(truth["step"] >= LEAST_STEPS)
    return bool(truth["phases_done"] == found.index)


def narrowed(found: Window, limit: int, truth: dict[str, Any] | None) -> Window:
    """Return the part of a window that is left; ``truth``: None where the job ran through."""
    if truth is not None and truth["phases_done"] < found.index:
        return Window(found.index, limit, found.high)
    return Window(found.index, found.low, limit)
