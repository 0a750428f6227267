"""What a rule of the diagnosis is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """One piece of evidence for or against a cause."""

    cause: str
    when: str
    weight: float
    because: str
    """The evidence in words, formatted with the facts."""
    bytes: str | None = None
    """Name of the fact whose bytes the evidence carries."""
