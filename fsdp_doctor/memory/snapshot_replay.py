"""Replay a trace held in columns: which block lived when, and the curves that follow from it.

The rules are those of ``cuda_trace`` (allocated falls at ``free_requested``, active at
``free_completed``; a block whose free is missing dies when its address is given out again; a free
without an allocation, and an allocated block of the segments that the trace never names, are older
than the trace), for millions of events at once. A *position* is the number of trace entries before
a moment, so the index of an entry is the position just before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdp_doctor.memory.cuda_trace import ROUNDING_BYTES
from fsdp_doctor.memory.snapshot_reader import ACTION, ALLOCATED, INACTIVE, Ints, Snapshot, Trace

NEVER = int(np.iinfo(np.int64).max)
BEFORE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Every block that lived in the window of the trace, as columns."""

    addr: Ints
    requested: Ints
    size: Ints
    """Rounded to 512 bytes."""
    rest: Ints
    """What the allocator counts beyond ``size`` (unsplit, or rounded to a power of two); known
    only of blocks that are alive at the end, else 0."""
    stream: Ints
    pool: Ints
    stack: Ints
    born: Ints
    """Index of its allocation; ``BEFORE``: older than the trace."""
    died: Ints
    """Index of ``free_requested``; ``NEVER``."""
    completed: Ints
    """Index of ``free_completed``; ``NEVER``."""

    def __len__(self) -> int:
        return len(self.addr)

    def alive_at(self, position: int) -> Ints:
        """Indexes of the blocks that are allocated after ``position`` entries."""
        return np.flatnonzero((self.born < position) & (self.died >= position))

    def active_at(self, position: int) -> Ints:
        """Also those that were freed and wait for another stream."""
        return np.flatnonzero((self.born < position) & (self.completed >= position))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One device's trace, replayed. Curves have one value per position, 0 to ``len(trace)``."""

    device: int
    trace: Trace
    blocks: Blocks
    allocated: Ints
    active: Ints
    reserved: Ints
    notes: tuple[str, ...]
    """What does not add up."""

    @property
    def end(self) -> int:
        """The last position."""
        return len(self.trace)


def empty_trace() -> Trace:
    """A trace without events: of a snapshot that has segments alone."""
    nothing = np.zeros(0, dtype=np.int64)
    return Trace(
        action=np.zeros(0, dtype=np.uint8),
        addr=nothing,
        size=nothing,
        time=nothing,
        stream=nothing,
        pool=nothing,
        stack=nothing,
    )


def replay(snapshot: Snapshot, device: int) -> Replay:
    """Replay the events of one device against the segments the snapshot ends in."""
    trace = snapshot.traces[device] if device < len(snapshot.traces) else empty_trace()
    notes: list[str] = []
    traced, orphans, addresses = _pair(trace)
    if orphans:
        notes.append(f"{orphans} frees have no allocation in the trace")
    blocks = _with_end_state(snapshot, device, traced, addresses, notes)
    on_device = snapshot.segments["device"] == device
    return Replay(
        device=device,
        trace=trace,
        blocks=blocks,
        allocated=_curve(len(trace), blocks.born, blocks.died, blocks.size + blocks.rest),
        active=_curve(len(trace), blocks.born, blocks.completed, blocks.size + blocks.rest),
        reserved=_reserved(trace, int(snapshot.segments["size"][on_device].sum())),
        notes=tuple(notes),
    )


def rounded(sizes: Ints) -> Ints:
    """What the allocator counts for requests of these sizes, at least one block of 512 each."""
    return np.maximum(ROUNDING_BYTES, -(-sizes // ROUNDING_BYTES) * ROUNDING_BYTES)


def _pair(trace: Trace) -> tuple[Blocks, int, Ints]:
    """Blocks that the trace itself tells of, how many frees fit none, and its addresses."""
    alloc, requested, completed = (ACTION[name] for name in (
        "alloc", "free_requested", "free_completed",
    ))  # fmt: skip
    events = trace.where("alloc", "free_requested", "free_completed")
    events = events[np.argsort(trace.addr[events], kind="stable")]
    addr, kind = trace.addr[events], trace.action[events]
    count = len(events)
    first = np.ones(count + 2, dtype=bool)
    first[1:count] = addr[1:] != addr[:-1]
    starts = first[:count] | (kind == alloc)
    before, now = kind[:-1], kind[1:]
    continues = (before == alloc) | ((before == requested) & (now != requested))
    orphans = int((~starts[1:] & ~continues).sum())
    # where a block's story has its free: at its own entry (older than the trace), or the next one
    here = np.flatnonzero(starts)
    own = kind[here] != alloc
    free_at = np.where(own, here, np.where(first[here + 1], count, here + 1))
    what = np.append(kind, np.array([255, 255], kind.dtype))
    freed, then = what[free_at], what[free_at + 1]
    done_at = np.where(freed == requested, count, free_at)
    both = (freed == requested) & ~first[free_at + 1] & (then == completed)
    done_at[both] = free_at[both] + 1
    after = np.append(events, NEVER)
    index = events[here]
    return (
        Blocks(
            addr=trace.addr[index],
            requested=trace.size[index],
            size=rounded(trace.size[index]),
            rest=np.zeros(len(index), dtype=np.int64),
            stream=trace.stream[index].astype(np.int64),
            pool=trace.pool[index].astype(np.int64),
            stack=np.where(own, -1, trace.stack[index]).astype(np.int64),
            born=np.where(own, BEFORE, index),
            died=np.where(own & (freed == completed), BEFORE, after[free_at]),
            completed=after[done_at],
        ),
        orphans,
        addr[first[:count]],
    )


def _with_end_state(
    snapshot: Snapshot, device: int, traced: Blocks, addresses: Ints, notes: list[str]
) -> Blocks:
    """Add blocks the trace never names, and the true size of those alive at the end."""
    block = snapshot.blocks
    of_device = snapshot.segments["device"][block["segment"]] == device
    live = np.flatnonzero(of_device & (block["state"] != INACTIVE))
    if not of_device.any():
        return traced
    addr = block["address"][live]
    order = np.argsort(addr, kind="stable")
    live, addr = live[order], addr[order]
    at_end = np.flatnonzero(traced.died == NEVER)
    slot = np.minimum(np.searchsorted(addr, traced.addr[at_end]), max(len(addr) - 1, 0))
    found = _contains(addr, traced.addr[at_end])
    lost = int((~found).sum())
    if lost:
        notes.append(f"{lost} blocks of the trace are not in the segments (events fell between)")
    rest = traced.rest.copy()
    sizes = block["size"][live]
    rest[at_end[found]] = np.maximum(sizes[slot[found]] - traced.size[at_end[found]], 0)
    ghosts = live[~_contains(addresses, addr)]
    return _append_ghosts(snapshot, traced, rest, ghosts)


def _contains(ordered: Ints, wanted: Ints) -> npt.NDArray[np.bool_]:
    """Whether each of ``wanted`` is among ``ordered``."""
    if not len(ordered):
        return np.zeros(len(wanted), dtype=np.bool_)
    slot = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return np.asarray(ordered[slot] == wanted, dtype=np.bool_)


def _append_ghosts(snapshot: Snapshot, traced: Blocks, rest: Ints, ghosts: Ints) -> Blocks:
    block, segment = snapshot.blocks, snapshot.segments
    owner = block["segment"][ghosts]
    size = rounded(block["requested"][ghosts])
    allocated = block["state"][ghosts] == ALLOCATED
    return Blocks(
        addr=np.concatenate([traced.addr, block["address"][ghosts]]),
        requested=np.concatenate([traced.requested, block["requested"][ghosts]]),
        size=np.concatenate([traced.size, np.minimum(size, block["size"][ghosts])]),
        rest=np.concatenate([rest, np.maximum(block["size"][ghosts] - size, 0)]),
        stream=np.concatenate([traced.stream, segment["stream"][owner]]),
        pool=np.concatenate([traced.pool, segment["pool"][owner]]),
        stack=np.concatenate([traced.stack, block["stack"][ghosts]]),
        born=np.concatenate([traced.born, np.full(len(ghosts), BEFORE)]),
        died=np.concatenate([traced.died, np.where(allocated, NEVER, BEFORE)]),
        completed=np.concatenate([traced.completed, np.full(len(ghosts), NEVER)]),
    )


def _curve(count: int, born: Ints, gone: Ints, size: Ints) -> Ints:
    delta = np.zeros(count + 1, dtype=np.int64)
    older = born == BEFORE
    delta[0] = size[older & (gone != BEFORE)].sum()
    delta[born[~older] + 1] += size[~older]
    # a block can die at the entry that starts another one, but never two at one entry
    ends = (gone != NEVER) & (gone != BEFORE)
    delta[gone[ends] + 1] -= size[ends]
    return np.cumsum(delta)


def _reserved(trace: Trace, at_end: int) -> Ints:
    delta = np.zeros(len(trace) + 1, dtype=np.int64)
    up, down = trace.where("segment_alloc", "segment_map"), trace.where(
        "segment_free", "segment_unmap"
    )  # fmt: skip
    delta[up + 1] = trace.size[up]
    delta[down + 1] = -trace.size[down]
    curve = np.cumsum(delta)
    return np.asarray(curve + (at_end - curve[-1]))
