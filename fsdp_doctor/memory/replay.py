"""Replay a log of allocations through the model of the caching allocator."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_doctor.memory.caching_allocator import AllocatorSettings, Block, CachingAllocator
from fsdp_doctor.memory.events import EventLog, PhaseSpan
from fsdp_doctor.memory.expandable_segments import make_allocator
from fsdp_doctor.model.memory import MemoryCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCounters:
    """What ``torch.cuda.memory_stats`` would say at a phase's end, and its peaks."""

    span: PhaseSpan
    end: MemoryCounters
    peak: MemoryCounters


@dataclass(slots=True, kw_only=True)
class Replay:
    """The allocator after all events, and its counters by phase."""

    allocator: CachingAllocator
    phases: list[PhaseCounters] = field(default_factory=list)
    peak_reserved_bytes: int = 0


class _Peaks:
    """Largest counters since the last reset."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self.reset()

    def reset(self) -> None:
        self._values = self._now()

    def note(self) -> None:
        self._values = tuple(map(max, self._values, self._now()))

    def _now(self) -> tuple[int, ...]:
        source = self._allocator
        return (
            source.allocated_bytes,
            source.reserved_bytes,
            source.active_bytes,
            source.requested_bytes,
        )

    def current(self) -> MemoryCounters:
        return _counters(self._now())

    def largest(self) -> MemoryCounters:
        return _counters(self._values)


def _counters(values: tuple[int, ...]) -> MemoryCounters:
    allocated, reserved, active, requested = values
    return MemoryCounters(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        active_bytes=active,
        requested_bytes=requested,
    )


@dataclass(slots=True)
class StreamNotes:
    """What several streams do to the life of blocks."""

    uses: dict[int, set[int]] = field(default_factory=dict)
    """Allocation id -> other streams that use it (``record_stream``): freed, it stays active until
    they are done."""
    waits: list[tuple[int, int]] = field(default_factory=list)
    """(position, earlier position): at the first the host waited for what was queued at the
    second."""
    releases: list[int] = field(default_factory=list)
    """Positions of ``torch.cuda.empty_cache()``."""

    def without_uses(self) -> StreamNotes:
        """The same for a GPU that has done everything at once."""
        return StreamNotes(releases=self.releases)


def replay_log(
    log: EventLog,
    settings: AllocatorSettings | None = None,
    streams: StreamNotes | None = None,
) -> Replay:
    """Replay every event of ``log`` and count phase by phase.

    What other streams use is taken to be done when the host waited for it, or when the step ends.
    Raises OutOfMemoryModelled.
    """
    player = _Player(log, settings, streams or StreamNotes())
    result = Replay(allocator=player.allocator)
    step = -1
    for span in log.phases:
        player.play(span.begin)
        if span.step != step:
            player.allocator.process_events()
            step = span.step
        player.peaks.reset()
        player.play(log.position if span.end is None else span.end)
        counters = PhaseCounters(span=span, end=player.peaks.current(), peak=player.peaks.largest())
        result.phases.append(counters)
        reserved = counters.peak.reserved_bytes or 0
        result.peak_reserved_bytes = max(result.peak_reserved_bytes, reserved)
    player.play(log.position)
    return result


class _Player:
    """Feeds events to an allocator."""

    def __init__(
        self, log: EventLog, settings: AllocatorSettings | None, streams: StreamNotes
    ) -> None:
        self.allocator = make_allocator(settings)
        self.peaks = _Peaks(self.allocator)
        self._log, self._uses = log, streams.uses
        self._waits = sorted(streams.waits, reverse=True)
        self._releases = sorted(streams.releases, reverse=True)
        self._blocks: dict[int, Block] = {}
        self._position = 0

    def play(self, end: int) -> None:
        """Replay up to a position."""
        while self._releases and self._releases[-1] <= end:
            position = self._releases.pop()
            self._play_waiting(position)
            self.allocator.release_cached()
        self._play_waiting(end)

    def _play_waiting(self, end: int) -> None:
        while self._waits and self._waits[-1][0] <= end:
            position, done = self._waits.pop()
            self._play(position)
            self.allocator.process_events(done)
        self._play(end)

    def _play(self, end: int) -> None:
        allocator, blocks = self.allocator, self._blocks
        for position in range(self._position, end):
            event = self._log.events[position]
            if event < 0:
                allocator.free(blocks.pop(-event - 1), position)
                continue
            allocation = self._log.allocations[event - 1]
            block = allocator.allocate(allocation.requested_bytes, allocation.stream)
            for stream in self._uses.get(allocation.id, ()):
                allocator.record_stream(block, stream)
            blocks[allocation.id] = block
            self.peaks.note()
        self._position = max(self._position, end)
