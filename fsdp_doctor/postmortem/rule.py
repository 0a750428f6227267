"""What a rule of the diagnosis is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    times: str | None = None
    """Name of a fact from 0 to 1 that the weight is multiplied by: how much of it there is."""
    guess: bool = False
    """Whether it infers from the place of a failure what filled the device: a memory snapshot of
    the failure, which shows it, leaves it little weight."""
    source: Literal["log", "snapshot"] = "log"
