"""Findings: a claim with its evidence and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen, and where."""

    text: str
    file: str | None = None
    line: int | None = None
    rank: int | None = None
    step: int | None = None
    bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change to make."""

    change: str
    saves_bytes: int | None = None
    saves_text: str | None = None
    cost: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A claim about a run or a comparison."""

    cause: str
    claim: str
    confidence: float
    """0..1."""
    severity: Literal["error", "warning", "note"]
    level: int | None = None
    """Evidence level 0-4 of "flag F did it": 0 may, 1 predicted, 2 re-run one way, 3 both ways,
    4 both and the mechanism seen. None: not about a flag."""
    evidence: tuple[Evidence, ...] = ()
    rests_on: tuple[str, ...] = ()
    """Of a comparison: sides (``A``, ``B``; their launches are in its basis), simulated points
    (``S3``) and sources of formulas."""
    flags: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
