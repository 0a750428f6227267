"""Which changes make a spec fit into a GPU's memory, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp_doctor.model.work import TimeRange

Numerics = Literal["same", "rounding", "precision"]
"""same: the same sums, perhaps in another order. rounding: products or reductions round
differently. precision: weights or optimizer state are kept in fewer bits."""

NUMERICS: tuple[Numerics, ...] = ("same", "rounding", "precision")
"""From harmless to what needs a look at convergence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a combination."""

    name: str
    """Of the move that it is."""
    title: str
    saves: str
    costs: str
    numerics: Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeRange:
    """A relative change, as a range: 0.1 is 10 % more."""

    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a real run of a prescription showed."""

    source: str
    """The run's directory."""
    kind: Literal["recorded", "verified"]
    """recorded: found among recorded runs; verified: made for this answer."""
    status: str
    device_type: Literal["cuda", "cpu"] = "cuda"
    """cpu: the peak is that of tensors alone, not to be held against the prediction."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_time_s: float | None = None
    step_time_change: float | None = None
    """Relative to the spec as written, where that was measured alike."""
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The spec with some changes, as simulated."""

    changes: tuple[Change, ...]
    overrides: tuple[str, ...]
    """``KEY=VALUE`` texts for ``--set``."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the job needs set."""
    fits: bool | None
    """As ``estimate`` says it. None: the range of what lies outside torch decides. True with a
    negative headroom: while the allocator gives cached segments back."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    headroom_bytes: int
    """Memory less peak reserved less the high end of what lies outside torch."""
    step_time: TimeRange | None = None
    """A first guess."""
    step_time_change: RelativeRange | None = None
    """Of step time, from the spec as written: smallest and largest of low end, middle, high end."""
    numerics: Numerics = "same"
    warnings: tuple[str, ...] = ()
    """Rules that the changed spec newly breaks, without being refused for it."""
    measured: tuple[Measured, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A move that is not offered, and why."""

    name: str
    title: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededRanks:
    """At how many ranks the smallest variant would fit; None: at none that was tried."""

    world_size: int | None
    tried: tuple[int, ...]
    peak_reserved_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The answer of ``fit``."""

    world_size: int
    gpu: str
    memory_bytes: int
    outside_pytorch_bytes: tuple[int, int]
    as_written: Variant
    prescriptions: tuple[Variant, ...]
    """Those that fit and of which none is better in every respect; cheapest first."""
    smallest: Variant
    """The variant with the smallest peak reserved that was seen."""
    tried: tuple[Variant, ...]
    """Everything that was simulated, in that order, the spec as written first."""
    needed: NeededRanks | None
    """Where nothing fits and shards would shrink with more ranks."""
    refused: tuple[Refused, ...]
    kept: tuple[str, ...]
    simulations: int
    complete: bool
    """False: the limit of simulations ended the search."""
    assumptions: tuple[str, ...]
