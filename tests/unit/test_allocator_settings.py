"""Settings of the caching allocator: what each does by the rules of CUDACachingAllocator.cpp (torch
2.6), and the default and split limits against an allocator that was written again, naively.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_doctor.errors import InputError
from fsdp_doctor.memory.allocator_conf import parse_alloc_conf
from fsdp_doctor.memory.caching_allocator import AllocatorSettings, CachingAllocator
from fsdp_doctor.memory.expandable_segments import make_allocator

MIB = 1 << 20


class NaiveAllocator:
    """Segments as lists of [size, used] pieces, searched from one end to the other each time."""

    def __init__(self, max_split: int | None, divisions: int) -> None:
        self.max_split = max_split or 1 << 62
        self.divisions = divisions
        self.segments: list[tuple[bool, int, list[list[int]]]] = []

    def rounded(self, size: int) -> int:
        """Multiples of 512; with divisions the next n-th between two powers of two."""
        if self.divisions > 1 and size > 512 * self.divisions:
            power = 1
            while power * 2 <= size:
                power *= 2
            steps = [power + power * i // self.divisions for i in range(self.divisions + 1)]
            return min(step for step in steps if step >= size)
        return max(1, -(-size // 512)) * 512

    def allocate(self, size: int, stream: int) -> list[int]:
        """Return the piece: the smallest that fits, of equals that of the youngest segment."""
        size = self.rounded(size)
        small = size <= MIB
        fitting = [
            (piece[0], -age, place, pieces)
            for age, (kind, of, pieces) in enumerate(self.segments)
            for place, piece in enumerate(pieces)
            if (kind, of) == (small, stream) and not piece[1] and piece[0] >= size
        ]
        best = min(fitting, key=lambda item: item[:3], default=None)
        if best is not None and size < self.max_split <= best[0]:
            best = None
        if best is not None and size >= self.max_split and best[0] >= size + 20 * MIB:
            best = None
        if best is None:
            whole = (
                2 * MIB
                if small
                else 20 * MIB
                if size < 10 * MIB
                else -(-size // (2 * MIB)) * 2 * MIB
            )
            pieces, place = [[whole, 0]], 0
            self.segments.append((small, stream, pieces))
        else:
            _, _, place, pieces = best
        piece = pieces[place]
        rest = piece[0] - size
        if rest >= 512 if small else size < self.max_split and rest > MIB:
            piece[0] = size
            pieces.insert(place + 1, [rest, 0])
        piece[1] = 1
        return piece

    def free(self, piece: list[int]) -> None:
        """Join with free neighbours."""
        for _, _, pieces in self.segments:
            for place, candidate in enumerate(pieces):
                if candidate is piece:
                    piece[1] = 0
                    if place + 1 < len(pieces) and not pieces[place + 1][1]:
                        piece[0] += pieces.pop(place + 1)[0]
                    if place and not pieces[place - 1][1]:
                        pieces[place - 1][0] += pieces.pop(place)[0]
                    return

    @property
    def reserved(self) -> int:
        """All segments."""
        return sum(piece[0] for _, _, pieces in self.segments for piece in pieces)

    @property
    def allocated(self) -> int:
        """All used pieces."""
        return sum(piece[0] for _, _, pieces in self.segments for piece in pieces if piece[1])


SIZES = st.one_of(st.integers(1, 3 * MIB), st.integers(MIB, 60 * MIB))
ACTIONS = st.lists(st.tuples(st.integers(0, 4), SIZES, st.integers(0, 1)), max_size=80)


@settings(max_examples=120, deadline=None)
@given(ACTIONS, st.sampled_from([None, 21 * MIB, 40 * MIB]), st.sampled_from([0, 1, 4, 16]))
def test_a_naive_allocator_says_the_same(
    actions: list[tuple[int, int, int]], max_split: int | None, divisions: int
) -> None:
    """Reserved and allocated bytes after every request, whatever is freed between."""
    model = CachingAllocator(
        AllocatorSettings(max_split_size_bytes=max_split, roundup_power2_divisions=divisions)
    )
    naive = NaiveAllocator(max_split, divisions)
    live = []
    for action, size, stream in actions:
        if action < 2 and live:
            block, piece = live.pop(size % len(live))
            model.free(block)
            naive.free(piece)
        else:
            live.append((model.allocate(size, stream), naive.allocate(size, stream)))
        assert (model.reserved_bytes, model.allocated_bytes) == (naive.reserved, naive.allocated)


def limited(**options: float) -> CachingAllocator:
    """An allocator with 100 MiB."""
    return CachingAllocator(AllocatorSettings(capacity_bytes=100 * MIB, **options))  # type: ignore[arg-type]


def test_a_large_request_takes_no_block_much_larger_than_itself() -> None:
    """Above the split limit a block may be up to 20 MiB too large (``get_free_block``)."""
    for held, expected in ((59, 59), (60, 100)):
        allocator = CachingAllocator(AllocatorSettings(max_split_size_bytes=32 * MIB))
        allocator.free(allocator.allocate(held * MIB - MIB))
        allocator.allocate(40 * MIB)
        assert allocator.reserved_bytes // MIB in (expected - 1, expected)


def test_a_split_limit_releases_only_what_is_needed() -> None:
    """Out of capacity one block that is large enough goes, or the largest until they are; only
    then everything (``release_available_cached_blocks``).
    """
    allocator = limited(max_split_size_bytes=21 * MIB)
    blocks = [allocator.allocate(size * MIB) for size in (22, 30, 8)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(52 * MIB)
    assert allocator.reserved_bytes == (20 + 52) * MIB
    assert (allocator.segment_frees, allocator.retries) == (2, 0)


def test_garbage_collection_frees_all_that_are_as_old_as_the_average() -> None:
    """Not only what takes it under the threshold, and not what is younger
    (``garbage_collect_cached_blocks``).
    """
    allocator = CachingAllocator(
        AllocatorSettings(capacity_bytes=200 * MIB, garbage_collection_threshold=0.5)
    )
    for block in [allocator.allocate(34 * MIB) for _ in range(2)]:
        allocator.free(block)
    allocator.free(allocator.allocate(36 * MIB))
    assert allocator.reserved_bytes == 104 * MIB
    allocator.allocate(14 * MIB, stream=1)
    assert allocator.reserved_bytes == (36 + 14) * MIB
    assert allocator.segment_frees == 2


def test_garbage_collection_needs_a_capacity() -> None:
    """As torch needs ``set_per_process_memory_fraction``."""
    allocator = CachingAllocator(AllocatorSettings(garbage_collection_threshold=0.1))
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(70 * MIB)
    assert allocator.reserved_bytes == 130 * MIB


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    """It can grow, so it counts as the largest: a larger hole is used before it."""
    allocator = make_allocator(AllocatorSettings(expandable_segments=True))
    hole, _, end = (allocator.allocate(size * MIB) for size in (60, 20, 40))
    allocator.free(hole)
    allocator.free(end)
    assert allocator.allocate(40 * MIB).address == hole.address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", AllocatorSettings(expandable_segments=True)),
        (
            "max_split_size_mb:256, garbage_collection_threshold:0.8,roundup_power2_divisions:8",
            AllocatorSettings(
                max_split_size_bytes=256 * MIB,
                garbage_collection_threshold=0.8,
                roundup_power2_divisions=8,
            ),
        ),
        ("backend:native,pinned_use_cuda_host_register:True", AllocatorSettings()),
    ],
)
def test_alloc_conf_is_read(text: str, expected: AllocatorSettings) -> None:
    """As torch reads PYTORCH_CUDA_ALLOC_CONF."""
    assert parse_alloc_conf(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb", "no value"),
        ("max_split_size_mb:20", "more than 20"),
        ("max_split_size_mb:much", "max_split_size_mb:much"),
        ("roundup_power2_divisions:3", "powers of two"),
        ("roundup_power2_divisions:[256:1,>:8]", "roundup_power2_divisions"),
        ("garbage_collection_threshold:1", "between 0 and 1"),
        ("expandable_segments:yes", "True or False"),
        ("max_split:1", "not modelled"),
    ],
)
def test_wrong_alloc_conf_is_refused(text: str, message: str) -> None:
    """The option is named."""
    with pytest.raises(InputError, match=message):
        parse_alloc_conf(text)
