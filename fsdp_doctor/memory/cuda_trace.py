"""From a CUDA allocator snapshot and marks of the host to an event log. No torch.

The snapshot is what ``torch.cuda.memory._snapshot()`` returns (keys of torch 2.2 - 2.14, see
``c10/core/CachingDeviceAllocator.h``). Its trace has sizes as requested; the allocator rounds them
up to 512 bytes. Allocated bytes fall at ``free_requested`` (``free_completed`` ends *active*).

A mark is placed by the number of allocations and frees before it, which the allocator counts
exactly; by its time where that is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from fsdp_doctor.memory.events import Allocation, EventLog, Label, stronger
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.redact import short_path

ROUNDING_BYTES = 512
"""``kMinBlockSize`` of the CUDA caching allocator."""

_OPERATIONS = frozenset({"alloc", "free_requested"})
_CLOCK_SLACK_US = 20_000


class Begin(NamedTuple):
    """A phase begins."""

    step: int
    phase: Phase
    microbatch: int = 0


class End(NamedTuple):
    """The phase ends; the device's own peak of requested bytes in it, where known."""

    requested_peak_bytes: int | None = None


class Enter(NamedTuple):
    """A module's forward begins."""

    module: str


class Leave(NamedTuple):
    """A module's forward ends."""

    module: str


class Backward(NamedTuple):
    """Backward reaches a module's output."""

    module: str


class Holds(NamedTuple):
    """The block that is alive at ``address`` holds this."""

    address: int
    label: Label
    certain: bool = True
    """False: a hint, which gives way to a label."""


Note = Begin | End | Enter | Leave | Backward | Holds


class Mark(NamedTuple):
    """Something the host knows, and when."""

    time_us: int
    """Unix time in microseconds, the clock of the trace."""
    note: Note
    operations: int | None = None
    """Allocations + frees that the device had counted."""


@dataclass(slots=True)
class History:
    """A trace, read."""

    log: EventLog
    incomplete: list[str] = field(default_factory=list)
    device_free_bytes: int | None = None
    """Free bytes of the device at the last ``oom`` entry."""
    failed_bytes: int | None = None
    """Bytes of the request that failed last."""


def round_up(size: int) -> int:
    """Bytes that the allocator counts for a request of ``size``; at least one block of 512."""
    return max(ROUNDING_BYTES, -(-size // ROUNDING_BYTES) * ROUNDING_BYTES)


def read_history(
    snapshot: dict[str, Any],
    device_index: int,
    marks: Iterable[Mark],
    *,
    operations_at_end: int | None = None,
    expected_operations: int | None = None,
) -> History:
    """Replay the trace of one device.

    ``operations_at_end``: the device's count when the snapshot was taken; marks are then placed by
    count. ``expected_operations``: how many of them belong to the recording; fewer in the trace
    mean that the ring overflowed.
    """
    traces = snapshot.get("device_traces") or []
    trace = traces[device_index] if device_index < len(traces) else []
    reader = _Reader(History(EventLog()))
    present = sum(1 for entry in trace if entry["action"] in _OPERATIONS)
    if expected_operations is not None and present < expected_operations:
        reader.history.incomplete.append(
            f"the allocator's history lost {expected_operations - present} of its oldest events"
        )
    reader.adopt(_born_before(trace, snapshot.get("segments") or [], device_index))
    placed = _place(trace, list(marks), present, operations_at_end)
    reader.replay(trace, placed)
    return reader.history


def _born_before(
    trace: Sequence[dict[str, Any]], segments: Sequence[dict[str, Any]], device_index: int
) -> list[tuple[int, int]]:
    """(address, requested bytes) of blocks that are older than the trace."""
    alive: set[int] = set()
    found: list[tuple[int, int]] = []
    for entry in trace:
        if entry["action"] == "alloc":
            alive.add(entry["addr"])
        elif entry["action"] == "free_requested":
            if entry["addr"] not in alive:
                found.append((entry["addr"], entry["size"]))
            alive.discard(entry["addr"])
    for segment in segments:
        if segment.get("device", device_index) != device_index:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            here = block.get("address", address)
            if block["state"] == "active_allocated" and here not in alive:
                found.append((here, block.get("requested_size", block["size"])))
            address = here + block["size"]
    return found


def _place(
    trace: Sequence[dict[str, Any]], marks: list[Mark], present: int, at_end: int | None
) -> list[tuple[int, Note]]:
    """(number of trace entries before it, note) of every mark, in order."""
    times = [entry.get("time_us", 0) for entry in trace]
    if at_end is not None and all(mark.operations is not None for mark in marks):
        index_of = [i for i, entry in enumerate(trace) if entry["action"] in _OPERATIONS]
        placed = []
        for mark in marks:
            assert mark.operations is not None
            count = min(max(present - (at_end - mark.operations), 0), present)
            placed.append((index_of[count] if count < present else len(trace), mark.note))
        if _plausible(times, placed, marks):
            return placed
    result, index = [], 0
    for mark in sorted(marks, key=lambda mark: mark.time_us):
        while index < len(times) and times[index] < mark.time_us:
            index += 1
        result.append((index, mark.note))
    return result


def _plausible(
    times: Sequence[int], placed: Sequence[tuple[int, Note]], marks: Sequence[Mark]
) -> bool:
    """Whether the clock agrees with the counts at the phase borders."""
    for (index, note), mark in zip(placed, marks, strict=True):
        if not isinstance(note, Begin):
            continue
        if index > 0 and times[index - 1] > mark.time_us + _CLOCK_SLACK_US:
            return False
        if index < len(times) and 0 < times[index] < mark.time_us - _CLOCK_SLACK_US:
            return False
    return True


class _Reader:
    """Replays one trace into the log."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._log = history.log
        self._alive: dict[int, Allocation] = {}
        self._active: dict[int, int] = {}
        self._requested = 0
        self._peak_since_begin = 0
        self._peak_since_end = 0
        self._just_completed = 0
        """Bytes whose ``free_completed`` stands between the last operation and now: a mark in that
        gap may lie before or after it, for marks are placed by operations."""

    def adopt(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Blocks that are alive when the trace begins."""
        for address, size in blocks:
            self._allocate(address, size, 0, ())
        self._peak_since_end = self._requested

    def replay(self, trace: Sequence[dict[str, Any]], placed: list[tuple[int, Note]]) -> None:
        """Every entry in order (not by time), each mark before the entry it precedes."""
        todo = iter(placed)
        upcoming = next(todo, None)
        for index, entry in enumerate(trace):
            while upcoming is not None and upcoming[0] <= index:
                self._apply(upcoming[1])
                upcoming = next(todo, None)
            self._entry(entry)
        while upcoming is not None:
            self._apply(upcoming[1])
            upcoming = next(todo, None)

    def _entry(self, entry: dict[str, Any]) -> None:
        action = entry["action"]
        if action == "alloc":
            frames = format_frames(entry.get("frames") or ())
            self._allocate(entry["addr"], entry["size"], entry.get("stream", 0), frames)
        elif action == "free_requested":
            self._just_completed = 0
            allocation = self._alive.pop(entry["addr"], None)
            if allocation is not None:
                self._log.free(allocation)
        elif action == "free_completed":
            size = self._active.pop(entry["addr"], 0)
            self._requested -= size
            self._just_completed += size
        elif action == "oom":
            self.history.failed_bytes = entry["size"]
            self.history.device_free_bytes = entry.get("device_free")

    def _allocate(self, address: int, size: int, stream: int, frames: tuple[str, ...]) -> None:
        self._just_completed = 0
        old = self._alive.pop(address, None)
        if old is not None:  # its free is missing (``skip_actions``, or a lost entry)
            self._log.free(old)
        self._requested += size - self._active.pop(address, 0)
        self._active[address] = size
        self._peak_since_begin = max(self._peak_since_begin, self._requested)
        self._peak_since_end = max(self._peak_since_end, self._requested)
        self._alive[address] = self._log.allocate(
            size, size_bytes=round_up(size), stream=stream, frames=frames
        )

    def _apply(self, note: Note) -> None:
        log = self._log
        if isinstance(note, Begin):
            log.begin_phase(note.step, note.phase, note.microbatch)
            self._peak_since_begin = self._requested
        elif isinstance(note, End):
            self._check(note)
            log.end_phase()
            self._peak_since_end = self._requested + self._just_completed
        elif isinstance(note, Enter):
            log.enter_module(note.module)
        elif isinstance(note, Leave):
            log.leave_module(note.module)
        elif isinstance(note, Backward):
            log.enter_backward(note.module)
        else:
            self._hold(note)

    def _check(self, note: End) -> None:
        """The device's own peak of requested bytes must be the trace's, to the byte.

        Its peak was reset somewhere between the end of the phase before and this one's begin.
        """
        span, seen = self._log.phases[-1] if self._log.phases else None, self._peak_since_begin
        device = note.requested_peak_bytes
        if device is None or span is None or seen <= device <= self._peak_since_end:
            return
        self.history.incomplete.append(
            f"step {span.step} {span.phase.value}: the device counted a peak of "
            f"{device} requested bytes, the history has {seen}"
        )

    def _hold(self, note: Holds) -> None:
        allocation = self._alive.get(note.address)
        if allocation is None:
            return
        if not note.certain:
            allocation.hint = note.label
        elif stronger(note.label, allocation.label):
            allocation.label = note.label
            self._log.identified |= note.label.category is Category.PARAMETERS


def format_frames(frames: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Python frames as ``file:line function``; C++ frames (file ``??``) are dropped."""
    return tuple(
        _frame(frame["filename"], frame["line"], frame["name"])
        for frame in frames
        if frame["filename"] != "??"
    )


@lru_cache(maxsize=65536)
def _frame(path: str, line: int, name: str) -> str:
    return f"{short_path(path)}:{line} {name}"


def hint_autocast_casts(log: EventLog, weights: dict[str, tuple[int, ...]]) -> None:
    """Recognise autocast's low-precision copies of weights by size and place.

    ``weights``: module -> elements of each of its float32 parameters. ``torch.autocast`` casts a
    layer's input, then its weight, then its bias, each to two bytes per element, before the
    layer's own output is allocated: of the blocks of the right size in one call, the output (the
    last) is left out and the last of the rest is the weight's copy.
    """
    born: dict[int, list[Allocation]] = {}
    for allocation in log.allocations:
        if allocation.scope is not None and allocation.region == "forward":
            born.setdefault(allocation.scope, []).append(allocation)
    label = Label(Category.UNSHARDED_PARAMETERS, "autocast_cast")
    for scope, members in born.items():
        for elements in weights.get(log.scopes[scope].module, ()):
            fitting = [a for a in members[:-1] if a.requested_bytes == 2 * elements]
            if fitting and fitting[-1].hint is None:
                fitting[-1].hint = label
