"""How reserved memory is divided: free pieces, what pins a segment, and why a request failed.

Rules of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.6 - 2.14): requests up to 1 MiB come from
2 MiB segments, below 10 MiB from segments of 20 MiB, others from segments of their own size in
steps of 2 MiB; a block is reused only by its stream and pool; a rest of at most 1 MiB of a large
block is not split off; segments without blocks are given back before a request fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fsdp_doctor.memory.events import Allocation
from fsdp_doctor.memory.snapshot_reader import ACTION, Ints, Snapshot
from fsdp_doctor.memory.snapshot_replay import Replay
from fsdp_doctor.memory.timeline import SMALL_BLOCK_BYTES, top_allocations
from fsdp_doctor.model.snapshot import OomEvent, PinnedSegment, PoolSpace, Space

SMALL_SEGMENT = 2 << 20
MEDIUM_LIMIT = 10 << 20
MEDIUM_SEGMENT = 20 << 20
MAX_PINNED = 12
Verdict = Literal["full", "fragmented", "combined", "limit", "other_pool", "fitting"]


@dataclass(slots=True)
class Range:
    """Reserved addresses of one kind."""

    address: int
    size: int
    stream: int
    pool: int
    large: bool
    expandable: bool
    free: int = 0
    largest: int = 0
    blocks: Ints | None = None
    """Indexes of the blocks in it."""

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.size


def driver_bytes(request: int) -> int:
    """Size of the segment that the allocator asks the driver for."""
    if request <= SMALL_BLOCK_BYTES:
        return SMALL_SEGMENT
    if request < MEDIUM_LIMIT:
        return MEDIUM_SEGMENT
    return -(-request // SMALL_SEGMENT) * SMALL_SEGMENT


def ranges_at(snapshot: Snapshot, replay: Replay, position: int) -> list[Range]:
    """The reserved ranges after ``position`` entries: the final ones, later events undone."""
    ranges = _final_ranges(snapshot, replay.device)
    trace = replay.trace
    changes = trace.where("segment_alloc", "segment_map", "segment_free", "segment_unmap")
    up = (ACTION["segment_alloc"], ACTION["segment_map"])
    mapped = (ACTION["segment_map"], ACTION["segment_unmap"])
    for index in changes[changes >= position][::-1].tolist():
        address, size = int(trace.addr[index]), int(trace.size[index])
        action = int(trace.action[index])
        if action in up:
            ranges = [part for r in ranges for part in _without(r, address, address + size)]
        else:
            stream, pool = int(trace.stream[index]), int(trace.pool[index])
            large = size != SMALL_SEGMENT
            ranges.append(Range(address, size, stream, pool, large, action in mapped))
    ranges = _merged(ranges)
    _fill(ranges, replay, position)
    return ranges


def _merged(ranges: list[Range]) -> list[Range]:
    """Join neighbours of an expandable segment, which is mapped and unmapped page by page."""
    found: list[Range] = []
    for r in sorted(ranges, key=lambda r: r.address):
        last = found[-1] if found else None
        joins = last is not None and last.expandable and r.expandable and last.end == r.address
        if last is not None and joins and (last.stream, last.pool) == (r.stream, r.pool):
            last.size += r.size
        else:
            found.append(r)
    return found


def _final_ranges(snapshot: Snapshot, device: int) -> list[Range]:
    segment = snapshot.segments
    chosen = np.flatnonzero(segment["device"] == device)
    return [
        Range(address, size, stream, pool, bool(large), bool(expandable))
        for address, size, stream, pool, large, expandable in zip(
            *(
                segment[name][chosen].tolist()
                for name in ("address", "size", "stream", "pool", "large", "expandable")
            ),
            strict=True,
        )
    ]


def _without(whole: Range, begin: int, end: int) -> list[Range]:
    if end <= whole.address or begin >= whole.end:
        return [whole]
    parts = ((whole.address, begin), (end, whole.end))
    return [
        Range(low, high - low, whole.stream, whole.pool, whole.large, whole.expandable)
        for low, high in parts
        if high > low
    ]


def _fill(ranges: list[Range], replay: Replay, position: int) -> None:
    """Find the free pieces between the blocks of each range."""
    blocks = replay.blocks
    live = blocks.active_at(position)
    live = live[np.argsort(blocks.addr[live], kind="stable")]
    starts = blocks.addr[live]
    ends = starts + blocks.size[live] + blocks.rest[live]
    for r in ranges:
        low, high = np.searchsorted(starts, (r.address, r.end))
        r.blocks = live[low:high]
        gaps = np.append(starts[low:high], r.end) - np.append(r.address, ends[low:high])
        if r.large and high > low:
            behind_block = gaps[1:]
            behind_block[behind_block <= SMALL_BLOCK_BYTES] = 0  # the rest that is not split off
        gaps = np.maximum(gaps, 0)
        r.free, r.largest = int(gaps.sum()), int(gaps.max())


def describe_space(
    snapshot: Snapshot, ranges: list[Range], block: Callable[[int], Allocation]
) -> Space:
    """Free memory per kind, and the segments that small blocks pin."""
    kinds: dict[tuple[int, int, bool], list[Range]] = {}
    for r in ranges:
        kinds.setdefault((r.stream, r.pool, r.large), []).append(r)
    pools = [
        PoolSpace(
            stream=snapshot.streams[stream],
            pool=snapshot.pools[pool],
            large=large,
            segments=len(members),
            reserved_bytes=sum(r.size for r in members),
            free_bytes=sum(r.free for r in members),
            largest_free_bytes=max(r.largest for r in members),
            releasable_bytes=sum(r.size for r in members if _empty(r)),
        )
        for (stream, pool, large), members in kinds.items()
    ]
    pools.sort(key=lambda pool: (-pool.reserved_bytes, pool.stream, pool.pool))
    held = sorted((r for r in ranges if r.free and not _empty(r)), key=lambda r: -r.free)
    return Space(
        pools=tuple(pools),
        pinned=tuple(_pinned(snapshot, r, block) for r in held[:MAX_PINNED]),
        free_bytes=sum(r.free for r in ranges),
        pinned_free_bytes=sum(r.free for r in held),
    )


def _empty(r: Range) -> bool:
    return r.blocks is None or not len(r.blocks)


def _pinned(snapshot: Snapshot, r: Range, block: Callable[[int], Allocation]) -> PinnedSegment:
    assert r.blocks is not None
    inside = [block(index) for index in r.blocks[:1000].tolist()]
    return PinnedSegment(
        address=r.address,
        size_bytes=r.size,
        free_bytes=r.free,
        blocks=len(r.blocks),
        stream=snapshot.streams[r.stream],
        pool=snapshot.pools[r.pool],
        pinned_by=top_allocations(inside, 1)[0],
    )


def explain_oom(
    snapshot: Snapshot, replay: Replay, index: int, count: int, ranges: list[Range]
) -> OomEvent:
    """Why the request of trace entry ``index`` found no place among ``ranges``."""
    trace = replay.trace
    request = int(trace.size[index])
    stream, pool = int(trace.stream[index]), int(trace.pool[index])
    large = request > SMALL_BLOCK_BYTES
    own = [r for r in ranges if (r.stream, r.pool, r.large) == (stream, pool, large)]
    others = [r for r in ranges if (r.stream, r.pool) != (stream, pool) and r.large == large]
    free = sum(r.free for r in own)
    largest = _largest(own)
    elsewhere = _largest(others)
    device_free = int(trace.addr[index])
    stack = int(trace.stack[index])
    return OomEvent(
        requested_bytes=request,
        driver_bytes=driver_bytes(request),
        device_free_bytes=device_free,
        stream=snapshot.streams[stream],
        pool=snapshot.pools[pool],
        frames=snapshot.stacks[stack].frames if stack >= 0 else (),
        count=count,
        free_bytes=free,
        largest_free_bytes=largest,
        elsewhere_bytes=elsewhere,
        verdict=_verdict(request, device_free, free=free, largest=largest, elsewhere=elsewhere),
    )


def _largest(ranges: list[Range]) -> int:
    """Largest contiguous free piece."""
    return max((r.largest for r in ranges), default=0)


def _verdict(request: int, device_free: int, *, free: int, largest: int, elsewhere: int) -> Verdict:
    if largest >= request:
        return "fitting"
    if free >= request:
        return "fragmented"
    if device_free >= driver_bytes(request):
        return "limit"
    if elsewhere >= request:
        return "other_pool"
    if free + device_free >= request and free >= request // 20:
        return "combined"
    return "full"
