"""Expandable segments: pages that are mapped, given back and mapped again, by the rules of
CUDACachingAllocator.cpp (torch 2.11), and the whole against an allocator that knows no blocks.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_doctor.memory.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    OutOfMemoryModelled,
)
from fsdp_doctor.memory.expandable_segments import make_allocator

MIB = 1 << 20
Span = tuple[int, int]


class NaivePool:
    """Pages that are mapped and spans that are in use; what is free follows."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.mapped: set[int] = set()
        self.used: list[Span] = []

    def free_spans(self) -> list[Span]:
        """Mapped and not in use, as long as can be, by address."""
        edges: list[Span] = [(number * self.page, self.page) for number in sorted(self.mapped)]
        for start, size in self.used:
            cut: list[Span] = []
            for low, length in edges:
                high = low + length
                if low < min(start, high):
                    cut.append((low, min(start, high) - low))
                if max(start + size, low) < high:
                    cut.append((max(start + size, low), high - max(start + size, low)))
            edges = cut
        joined: list[Span] = []
        for low, length in edges:
            if joined and sum(joined[-1]) == low:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((low, length))
        return joined

    def unmapped_after(self, address: int) -> int:
        """How many bytes without memory follow."""
        if address % self.page or address // self.page in self.mapped:
            return 0
        beyond = [number for number in self.mapped if number * self.page > address]
        return min(beyond) * self.page - address if beyond else 1 << 60

    def place(self, size: int) -> int | None:
        """Where free memory serves the request."""
        fitting = sorted((length, low) for low, length in self.free_spans() if length >= size)
        room = [length + self.unmapped_after(low + length) for length, low in fitting]
        for index, (_, low) in enumerate(fitting):
            if index + 1 == len(fitting) or room[index + 1] >= room[index]:
                return low
        return None

    def lowest(self, size: int) -> int:
        """Where free memory and addresses without memory together are long enough."""
        starts = {low for low, length in self.free_spans() if self.unmapped_after(low + length)}
        holes = {number + 1 for number in self.mapped if number + 1 not in self.mapped}
        for hole in {0, *holes} - self.mapped:
            address = hole * self.page
            if not any(low + length == address for low, length in self.free_spans()):
                starts.add(address)
        for start in sorted(starts):
            nearest = min((low for low, _ in self.used if low >= start), default=1 << 62)
            if nearest - start >= size:
                return start
        raise AssertionError

    def release(self) -> None:
        """Unmap pages without anything in use."""
        touched = {
            number
            for start, size in self.used
            for number in range(start // self.page, -(-(start + size) // self.page))
        }
        self.mapped &= touched


class NaiveExpandable:
    """One pool for each stream and kind of size."""

    def __init__(self, limit: int) -> None:
        self.limit, self.retries = limit, 0
        self.pools: dict[tuple[bool, int], NaivePool] = {}

    @property
    def reserved(self) -> int:
        """All mapped pages."""
        return sum(len(pool.mapped) * pool.page for pool in self.pools.values())

    def allocate(self, size: int, stream: int) -> tuple[NaivePool, Span] | None:
        """Return the pool and the span; None: out of memory."""
        size = -(-size // 512) * 512
        small = size <= MIB
        page = (2 if small else 20) * MIB
        pool = self.pools.setdefault((small, stream), NaivePool(page))
        asked = page if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        start = pool.place(size)
        if start is None:
            if self.reserved + asked > self.limit:
                self.retries += 1
                for each in self.pools.values():
                    each.release()
                if self.reserved + asked > self.limit:
                    return None
            start = pool.lowest(size)
            pool.mapped |= set(range(start // page, -(-(start + size) // page)))
        pool.used.append((start, size))
        return pool, (start, size)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.one_of(st.integers(1, 3 * MIB), st.integers(MIB, 70 * MIB)),
            st.integers(0, 1),
        ),
        max_size=60,
    )
)
def test_an_allocator_without_blocks_says_the_same(actions: list[tuple[int, int, int]]) -> None:
    """Reserved and allocated bytes, retries and refusals, under a limit, whatever is freed."""
    limit = 250 * MIB
    model = make_allocator(AllocatorSettings(capacity_bytes=limit, expandable_segments=True))
    naive = NaiveExpandable(limit)
    live = []
    for action, size, stream in actions:
        if action < 2 and live:
            block, (pool, span) = live.pop(size % len(live))
            model.free(block)
            pool.used.remove(span)
        else:
            expected = naive.allocate(size, stream)
            try:
                block = model.allocate(size, stream)
            except OutOfMemoryModelled:
                assert expected is None
            else:
                assert expected is not None
                live.append((block, expected))
        assert (model.reserved_bytes, model.retries) == (naive.reserved, naive.retries)


def test_pages_between_used_blocks_serve_other_streams() -> None:
    """Given back when memory is short, and mapped again later at the same place."""
    allocator = make_allocator(
        AllocatorSettings(capacity_bytes=145 * MIB, expandable_segments=True)
    )
    low, middle, high = (allocator.allocate(size * MIB) for size in (10, 60, 50))
    assert allocator.reserved_bytes == 120 * MIB
    allocator.free(middle)
    other = allocator.allocate(30 * MIB, stream=1)
    assert (allocator.reserved_bytes, allocator.retries) == (120 * MIB, 1)
    allocator.free(other)
    allocator.release_cached()
    again = allocator.allocate(60 * MIB)
    assert (low.address < again.address < high.address, again.address) == (True, middle.address)
    assert (allocator.segment_allocations, allocator.segment_frees) == (5, 2)


def test_a_limit_counts_a_segment_where_only_a_page_is_mapped() -> None:
    """First comes the question whether a segment for the whole request fits (``alloc_block``)."""
    allocator = make_allocator(AllocatorSettings(capacity_bytes=90 * MIB, expandable_segments=True))
    allocator.free(allocator.allocate(40 * MIB))
    with pytest.raises(OutOfMemoryModelled):
        allocator.allocate(92 * MIB)
    allocator.allocate(40 * MIB)
    with pytest.raises(OutOfMemoryModelled):
        allocator.allocate(52 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_the_plain_allocator_refuses_to_play_expandable_segments() -> None:
    """It would say what the other settings reserve."""
    with pytest.raises(ValueError, match="make_allocator"):
        CachingAllocator(AllocatorSettings(expandable_segments=True))
