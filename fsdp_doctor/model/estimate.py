"""What a spec would need, as simulated without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp_doctor.model.memory import Phase, TopAllocation
from fsdp_doctor.model.work import StepTimeGuess, StepWork


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEstimate:
    """Memory of one phase of a simulated step."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    end_allocated_bytes: int
    categories: dict[str, int]
    """Category -> bytes at the phase's peak; sums to ``peak_allocated_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Memory of one simulated step."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_reserved_low_bytes: int
    """The same when the GPU keeps up with the host, so that blocks which other streams use come
    back at once (FSDP1); equal elsewhere."""
    peak_phase: Phase
    resident_bytes: int
    """Allocated at the step's end."""
    resident: dict[str, int]
    """Category -> bytes of it."""
    categories: dict[str, int]
    """At the step's peak."""
    phases: dict[str, PhaseEstimate]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEstimate:
    """One simulated rank."""

    rank: int
    first_step: StepEstimate
    """It makes the optimizer's state."""
    steady: StepEstimate
    top_allocations: tuple[TopAllocation, ...]
    setup_peak_bytes: int
    """Allocated peak while the model is built and wrapped."""
    fits: dict[str, bool] = field(default_factory=dict)
    """Capacity in bytes, as text -> whether the run completes with that much to reserve."""
    events: int = 0
    layers: str | None = None
    """How it was come by without simulating every layer, or why all were; None: no need to say."""
    work: StepWork | None = None
    """What its steady step does; None: not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The answer of ``estimate``."""

    world_size: int
    gpu: str
    memory_bytes: int
    fits: bool | None
    """None: the ranges of what is not simulated decide."""
    headroom_bytes: int
    """Memory less the predicted peak of reserved less the high end of what lies outside torch."""
    method: Literal["simulated", "modelled"]
    assumptions: tuple[str, ...]
    outside_pytorch_bytes: tuple[int, int]
    ranks: tuple[RankEstimate, ...]
    step_time: StepTimeGuess | None = None
    """Of the slowest of these ranks; a first guess."""
