"""A limit on how much worse a metric may get, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["failed", "passed", "unclear", "not_comparable"]

ANY = "*"
"""Selects every value: a row for each phase, category or rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """``peak_allocated_bytes > 2 %``: the metric's change must not go beyond the threshold."""

    text: str
    """As the user wrote it."""
    metric: str
    threshold: float
    """Least change (B - A) that is still allowed; negative where more is better."""
    relative: bool
    """Whether ``threshold`` is a share of A, else it is in the metric's unit (bytes, s, count)."""
    rank: int | Literal["*"] | None = None
    """None: the row over all ranks."""
    phase: str | None = None
    """None: the row over the whole step; ANY: every phase, and of metrics that exist only by
    phase, that is the default."""
    category: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """A gate on one metric."""

    gate: str
    """The gate as written; ``completed`` for the gate that B ran at all."""
    metric: str
    rank: int | None = None
    phase: str | None = None
    category: str | None = None
    outcome: Outcome
    """failed: the change is beyond the threshold, as far as the statistics go; unclear: they
    allow no word; not_comparable: the sides differ in what the metric needs to be the same."""
    reason: str
    """One sentence with the numbers."""
    fails: bool
    """Whether it makes the exit status 1: a failed one does, and one that cannot be held; an
    unclear one where asked for."""
