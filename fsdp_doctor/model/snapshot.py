"""What a memory snapshot tells, and what two of them tell together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp_doctor.model.finding import Finding
from fsdp_doctor.model.memory import Category, Phase, TopAllocation
from fsdp_doctor.model.replay import AllocatorReplay


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The memory of a device at one moment."""

    name: Literal["peak", "failure", "end"]
    position: int
    """Trace entries before it."""
    time_s: float | None
    """Seconds since the first entry; None without a clock (torch < 2.2)."""
    step: int | None
    """Number of the step in this snapshot (its first is 0); None where steps are not known."""
    phase: Phase
    unit: str | None
    """FSDP unit or module that runs, where known."""
    allocated_bytes: int
    active_bytes: int
    """Allocated, and freed but still in use on another stream."""
    reserved_bytes: int
    categories: dict[str, int]
    """Category -> bytes; sums to ``allocated_bytes``."""
    top_allocations: tuple[TopAllocation, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One step of a snapshot."""

    step: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_phase: Phase
    start_allocated_bytes: int
    """When the step's first phase begins: what stays between steps."""
    complete: bool
    """Whether an optimizer step ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Stacked categories over a window, sampled so that no peak is lost."""

    positions: tuple[int, ...]
    times_s: tuple[float, ...] | None
    categories: dict[str, tuple[int, ...]]
    active_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    phases: tuple[tuple[int, int, int, Phase], ...] = ()
    """(first sample, last sample, step, phase)."""
    marked: int | None = None
    """Sample of the peak or failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpace:
    """Cached memory of one kind: only a request of the same kind can use it."""

    stream: int
    """Handle of the CUDA stream; 0 is the default one."""
    pool: tuple[int, int]
    """(0, 0) is the common pool, others are private (CUDA graphs, user pools)."""
    large: bool
    """Whether it serves requests above 1 MiB."""
    segments: int
    reserved_bytes: int
    free_bytes: int
    largest_free_bytes: int
    """Largest contiguous free block."""
    releasable_bytes: int
    """In segments without any block: the allocator can give them back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedSegment:
    """A segment that is mostly free and cannot be given back."""

    address: int
    size_bytes: int
    free_bytes: int
    blocks: int
    stream: int
    pool: tuple[int, int]
    pinned_by: TopAllocation
    """The largest of the blocks in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """How the reserved memory is divided at one moment."""

    pools: tuple[PoolSpace, ...]
    pinned: tuple[PinnedSegment, ...]
    """Those with the most free memory first."""
    free_bytes: int
    pinned_free_bytes: int
    """Free in segments that also hold blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomEvent:
    """A request that the allocator refused, and why nothing fitted."""

    requested_bytes: int
    """Rounded to 512 bytes, as the trace has it."""
    driver_bytes: int
    """What the allocator asks the driver for: whole segments (the number of the message)."""
    device_free_bytes: int | None
    """Free on the whole device, by the driver."""
    stream: int
    pool: tuple[int, int]
    frames: tuple[str, ...]
    count: int
    """Refused requests in the snapshot; this is the last."""
    free_bytes: int
    """Cached and free where the request may go."""
    largest_free_bytes: int
    """Largest contiguous piece of that."""
    elsewhere_bytes: int
    """Largest contiguous free piece of another stream's or a private pool's segments."""
    verdict: Literal["full", "fragmented", "combined", "limit", "other_pool", "fitting"]
    """full: nothing fits. fragmented: enough cached, in pieces. combined: cached pieces and the
    device's rest together suffice. limit: the device had room, a limit of the process did not.
    other_pool: a fitting piece belongs to another stream or pool. fitting: a fitting piece was
    there (an allocator limit such as max_split_size, or events lost)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What stays between steps, step by step."""

    steps: tuple[int, ...]
    start_allocated_bytes: tuple[int, ...]
    per_step_bytes: int
    """Median growth from step to step, the first step left out."""
    leaking: bool
    suspects: tuple[TopAllocation, ...] = ()
    """Blocks born in these steps and never freed, by the code that asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOutputs:
    """What forwards that no backward followed left behind, nearly all of one piece of code."""

    passes: int
    """Forwards since the last backward or optimizer step."""
    blocks: int
    bytes: int
    made_by: TopAllocation


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCopies:
    """Blocks as large as those of the state, made outside of the phases of a step."""

    blocks: int
    bytes: int
    refused: bool
    """Whether the same code made the request that was refused."""
    made_by: TopAllocation


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotAnalysis:
    """Everything one snapshot tells about one device."""

    path: str
    rank: int | None
    device: int
    format: str
    """Which torch wrote it, as far as its keys tell."""
    events: int
    size_bytes: int
    settings: dict[str, str | int | float | bool]
    peak: Moment
    failure: Moment | None
    """At the refused request."""
    end: Moment
    peak_reserved_bytes: int
    steps: tuple[StepSummary, ...]
    timeline: Timeline | None
    space: Space
    """At the failure, else at the end."""
    oom: OomEvent | None
    growth: Growth | None
    units: int = 0
    """FSDP units that annotations name."""
    replay: AllocatorReplay | None = None
    """What other allocator settings would have made of it; None where nothing was refused."""
    kept_outputs: KeptOutputs | None = None
    """Until the refused request; None where nothing was refused, or where there are none."""
    state_copies: StateCopies | None = None
    findings: tuple[Finding, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def focus(self) -> Moment:
        """The failure, else the peak."""
        return self.failure or self.peak


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryChange:
    """A category on both sides."""

    category: str
    a_bytes: int
    b_bytes: int
    a_start_bytes: int | None
    """What of it stays between steps."""
    b_start_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackChange:
    """What the same code holds on both sides."""

    category: Category
    subcategory: str | None
    phase: Phase
    operator: str | None
    frames: tuple[str, ...]
    """As on side B, or on A where B has none."""
    a_bytes: int
    b_bytes: int
    a_count: int
    b_count: int

    @property
    def delta_bytes(self) -> int:
        """B - A."""
        return self.b_bytes - self.a_bytes

    @property
    def what(self) -> Literal["new", "gone", "grew", "shrank", "same"]:
        """How it changed."""
        if self.delta_bytes == 0:
            return "same"
        if not self.a_bytes:
            return "new"
        if not self.b_bytes:
            return "gone"
        return "grew" if self.delta_bytes > 0 else "shrank"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotComparison:
    """Two snapshots side by side."""

    a: SnapshotAnalysis
    b: SnapshotAnalysis
    aligned: str
    """Which moments are compared, in words."""
    moment_a: Moment
    moment_b: Moment
    categories: tuple[CategoryChange, ...]
    stacks: tuple[StackChange, ...]
    """Those that changed, the largest change first."""
    findings: tuple[Finding, ...] = ()
    warnings: tuple[str, ...] = field(default=())
