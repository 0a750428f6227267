"""What a search by re-runs found: which changed fields made a job worse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Predicate = Literal["fits", "completes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectPoint:
    """One combination of fields and what became of its launches."""

    id: str
    """``P0`` is A, ``P1`` is B."""
    flipped: tuple[str, ...]
    """Changed fields that have B's value."""
    overrides: tuple[str, ...]
    """The same as ``KEY=VALUE`` upon A's spec."""
    runs: tuple[str, ...]
    """Directories of its launches."""
    value: float | None
    """Of the metric (bytes, or seconds: mean over launches); None: it could not run."""
    failure: str | None = None
    """Why it could not run, or how it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectShare:
    """What fields that are flipped together do to the metric."""

    keys: tuple[str, ...]
    value: float | None
    """Their share of the change; None: no point tells."""
    share: float | None
    interval: tuple[float, float] | None
    """95 % interval of ``value``; None for exact values."""
    first_in: float | None
    """The change when they alone are flipped in A."""
    last_out: float | None
    """The change that is missing when they alone are flipped back in B."""
    sufficient: bool
    """Whether alone in A they make 95 % of the change."""
    necessary: bool
    """Whether without them B falls short of 95 % of the change."""
    interacts_with: tuple[str, ...]
    level: int | None
    """3: adding them to A moves it and removing them from B moves it back; 2: one of both; None:
    nothing firm."""
    rests_on: tuple[str, ...]
    """Points (``P0``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectInteraction:
    """What fields do together beyond the sum of what each does alone."""

    keys: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """The outcome of a search."""

    name_a: str
    name_b: str
    metric: str | None
    """None: a predicate was searched."""
    until: Predicate | None
    unit: Literal["bytes", "s"] | None
    fields: tuple[tuple[str, ...], ...]
    """What was flipped, each entry as one."""
    points: tuple[BisectPoint, ...]
    delta: float | None
    interval: tuple[float, float] | None
    """95 % interval of ``delta``."""
    shares: tuple[BisectShare, ...]
    interactions: tuple[BisectInteraction, ...]
    rest: float | None
    """What the shares do not explain."""
    smallest_set: tuple[str, ...] | None
    """Fewest fields that make 95 % of the change, or make the job fail; None: none found."""
    smallest_set_share: float | None
    launches: int
    """Made by this call."""
    reused: int
    """Launches of earlier calls that were used again."""
    seconds: float
    complete: bool
    """Whether every point was evaluated as often as needed."""
    warnings: tuple[str, ...] = ()
