"""What became of a job's memory when its changed fields were flipped one by one or together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfPoint:
    """One combination of fields, and what a rank held with it."""

    id: str
    """``S0`` is A, the last one B; named by the rows of an attribution that rest on it."""
    flipped: tuple[str, ...]
    """Changed fields that have B's value; the others have A's."""
    overrides: tuple[str, ...]
    """The same as ``KEY=VALUE`` upon A's spec, as ``estimate --set`` takes them."""
    peak_allocated_bytes: int | None
    """None: it could not run."""
    peak_phase: str | None = None
    failure: str | None = None
    """Why it could not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfMiss:
    """What was simulated beside what was measured, in one category of one number."""

    metric: str
    phase: str | None
    category: str | None
    """None: over all categories."""
    measured: int
    """B - A as measured."""
    simulated: int
    """B - A as simulated."""

    @property
    def miss(self) -> int:
        """Measured less simulated bytes."""
        return self.measured - self.simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfInteraction:
    """What fields do together beyond the sum of what each does alone, over all categories."""

    metric: str
    phase: str | None
    keys: tuple[str, ...]
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfShare:
    """What fields that are flipped together do to one number, over all categories."""

    metric: str
    phase: str | None
    keys: tuple[str, ...]
    value: int | None
    """Their share of the difference, in bytes; None: no point tells."""
    share: float | None
    """The same as a part of the measured difference."""
    first_in: int | None
    """The change when they alone are flipped in A: are they sufficient?"""
    last_out: int | None
    """The change that is missing when they alone are flipped back in B: are they necessary?"""
    one_sided: bool
    """Whether only one of the two ends could be evaluated."""
    interacts_with: tuple[str, ...]
    level: int
    """Evidence level (see Finding.level)."""
    rests_on: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A design of simulated points, and how it held against the measured difference."""

    kind: Literal["factorial", "two-ended", "screened"]
    rank: int
    world_size: int
    device: Literal["cuda", "cpu"]
    """On which the simulated job runs."""
    fields: tuple[tuple[str, ...], ...]
    """The fields that were flipped; those of one entry together, since they are one key of the
    spec or valid only together."""
    not_simulated: tuple[str, ...]
    """Fields that no spec holds (variables, versions), and compilation: known effects alone."""
    points: tuple[WhatIfPoint, ...]
    misses: tuple[WhatIfMiss, ...]
    interactions: tuple[WhatIfInteraction, ...]
    shares: tuple[WhatIfShare, ...] = ()
    """Of every field, those that do nothing too, for each number that changed firmly."""
