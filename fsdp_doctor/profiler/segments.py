"""The memory of one stretch of work after another: a named phase, or what lies between phases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdp_doctor.memory.timeline import GAP_SCRATCH_BYTES
from fsdp_doctor.model.memory import MemoryCounters, Phase
from fsdp_doctor.profiler.counters import AllocatorState, CudaCounters, NoCounters
from fsdp_doctor.profiler.observe.guard import GuardedObserver
from fsdp_doctor.runs.phases import larger


@dataclass(slots=True)
class Segment:
    """Work that is going on."""

    phase: Phase
    microbatch: int
    start: Any
    """A mark of the step's clock, or the host's time outside of steps; None in a gap."""
    named: bool = True
    """False: a gap, the work of a step outside of its phases."""


@dataclass(slots=True)
class Gaps:
    """The gaps of one step, taken together."""

    end: MemoryCounters = field(default_factory=MemoryCounters)
    peak: MemoryCounters = field(default_factory=MemoryCounters)
    rise_bytes: int = 0

    def add(self, end: MemoryCounters, peak: MemoryCounters, rise_bytes: int) -> None:
        """Add one that has ended."""
        self.end, self.peak = end, larger(self.peak, peak)
        self.rise_bytes = max(self.rise_bytes, rise_bytes)

    @property
    def worked(self) -> bool:
        """Whether more was allocated than a loop's scalars."""
        return self.rise_bytes > GAP_SCRATCH_BYTES


class SegmentMemory:
    """Counts segments: by the device where it counts, else by the observer."""

    def __init__(self, counters: CudaCounters | NoCounters, observer: GuardedObserver) -> None:
        self._counters, self._observer = counters, observer
        self._level: int | None = None

    def state(self) -> AllocatorState:
        """Return the counters of now, with the peak since the last segment ended."""
        state = self._counters.read()
        if state.end.allocated_bytes is not None:
            return state
        end, peak = self._observer.seen()
        return AllocatorState(
            end=end,
            peak=peak,
            allocation_retries=state.allocation_retries,
            out_of_memory_count=state.out_of_memory_count,
        )

    def restart(self) -> None:
        """Forget the peak of what came before: a step begins."""
        self._counters.reset_peak()
        self._level = self.state().end.allocated_bytes

    def begin(self, step: int, phase: Phase, microbatch: int) -> None:
        """A segment begins."""
        self._observer.begin_phase(step, phase, microbatch)

    def end(self) -> tuple[MemoryCounters, MemoryCounters, int]:
        """End the segment; return its end, its peak and how far the peak rose above its start."""
        state = self.state()
        self._observer.end_phase()
        self._counters.reset_peak()
        peak, level = state.peak.allocated_bytes, self._level
        self._level = state.end.allocated_bytes
        return state.end, state.peak, 0 if peak is None or level is None else peak - level
