"""The model of CUDA's caching allocator: rules one by one, and properties of any history."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_doctor.memory.caching_allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfMemoryModelled,
    segment_size,
)
from fsdp_doctor.memory.events import EventLog
from fsdp_doctor.memory.expandable_segments import make_allocator
from fsdp_doctor.memory.replay import StreamNotes, replay_log
from fsdp_doctor.model.memory import Phase

MIB = 1 << 20


@pytest.mark.parametrize(
    ("request_bytes", "rounded", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_sizes_of_blocks_and_segments(request_bytes: int, rounded: int, segment: int) -> None:
    """Requests are rounded to 512 bytes and served from segments of 2, 20 or even MiB."""
    allocator = CachingAllocator()
    assert allocator.round_size(request_bytes) == rounded
    assert segment_size(rounded) == segment
    allocator.allocate(request_bytes)
    assert allocator.reserved_bytes == segment


def test_a_rest_of_at_most_one_mib_is_not_split_off_a_large_block() -> None:
    """The block keeps the rest, which counts as allocated."""
    allocator = CachingAllocator()
    block = allocator.allocate(11 * MIB)
    assert block.size == 12 * MIB
    assert allocator.allocated_bytes == 12 * MIB
    assert allocator.requested_bytes == 11 * MIB


def test_freed_neighbours_join_and_best_fit_takes_the_smallest() -> None:
    """Two freed halves serve a request of both; a small hole is preferred to a large one."""
    allocator = CachingAllocator()
    a, b, c = (allocator.allocate(4 * MIB) for _ in range(3))
    allocator.free(a)
    allocator.free(b)
    assert allocator.allocate(8 * MIB).address == a.address
    hole = allocator.allocate(4 * MIB)
    allocator.free(c)
    allocator.free(hole)
    assert allocator.reserved_bytes == 20 * MIB


def test_streams_have_pools_of_their_own() -> None:
    """A block freed on one stream is not given to another."""
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, stream=0))
    allocator.allocate(30 * MIB, stream=1)
    assert allocator.reserved_bytes == 60 * MIB


def test_what_another_stream_uses_waits() -> None:
    """A freed block stays active until events were processed, then it is used again."""
    allocator = CachingAllocator()
    block = allocator.allocate(30 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block, moment=7)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 30 * MIB)
    allocator.process_events(until=7)
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    allocator.process_events()
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_capacity_releases_cached_segments_before_it_gives_up() -> None:
    """The retry gives free segments back; what still does not fit is out of memory."""
    allocator = CachingAllocator(AllocatorSettings(capacity_bytes=100 * MIB))
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.retries, allocator.segment_frees) == (1, 1)
    with pytest.raises(OutOfMemoryModelled) as caught:
        allocator.allocate(30 * MIB)
    assert caught.value.reserved_bytes == 80 * MIB


def test_max_split_size_keeps_large_blocks_whole() -> None:
    """A small request never takes a block above the limit, and such blocks are not split."""
    limited = CachingAllocator(AllocatorSettings(max_split_size_bytes=32 * MIB))
    limited.free(limited.allocate(64 * MIB))
    limited.allocate(16 * MIB)
    assert limited.reserved_bytes == 80 * MIB
    limited.allocate(50 * MIB)
    assert limited.reserved_bytes == 80 * MIB


def test_roundup_power2_divisions() -> None:
    """Sizes are rounded up to an eighth of the power of two below."""
    allocator = CachingAllocator(AllocatorSettings(roundup_power2_divisions=8))
    assert allocator.round_size(9 * MIB + 1) == 10 * MIB
    assert allocator.round_size(8 * MIB) == 8 * MIB
    assert allocator.round_size(1000) == 1024


def test_garbage_collection_gives_old_segments_back() -> None:
    """Above the threshold a new segment is preceded by the release of the oldest."""
    allocator = CachingAllocator(
        AllocatorSettings(capacity_bytes=100 * MIB, garbage_collection_threshold=0.5)
    )
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(70 * MIB)
    assert allocator.reserved_bytes == 70 * MIB
    assert allocator.retries == 0


def test_expandable_segments_grow_instead_of_fragmenting() -> None:
    """A growing request reuses the free end of its segment; a rest is always split off."""
    native, expandable = (
        make_allocator(AllocatorSettings(expandable_segments=flag)) for flag in (False, True)
    )
    for allocator in (native, expandable):
        for size in (40, 60, 80):
            allocator.free(allocator.allocate(size * MIB))
    assert native.reserved_bytes == 180 * MIB
    assert expandable.reserved_bytes == 80 * MIB
    assert expandable.release_cached() == 80 * MIB
    assert expandable.reserved_bytes == 0


Action = tuple[int, int, int]
ACTIONS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 40 * MIB), st.integers(0, 2)), max_size=120
)
SETTINGS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, 25 * MIB]),
    roundup_power2_divisions=st.sampled_from([0, 4]),
)


def run(allocator: CachingAllocator, actions: list[Action]) -> list[Block]:
    """Allocate or free (action 0: free the oldest) and return what is still used."""
    live: list[Block] = []
    for action, size, stream in actions:
        if action == 0 and live:
            allocator.free(live.pop(0))
        else:
            live.append(allocator.allocate(size, stream))
    return live


@settings(max_examples=60, deadline=None)
@given(ACTIONS, SETTINGS)
def test_counters_and_blocks_agree(actions: list[Action], chosen: AllocatorSettings) -> None:
    """Used blocks never overlap, sums are the counters, and reserved bounds allocated."""
    allocator = make_allocator(chosen)
    live = run(allocator, actions)
    spans = sorted((block.address, block.size) for block in live)
    for (address, size), (following, _) in pairwise(spans):
        assert address + size <= following
    assert sum(size for _, size in spans) == allocator.allocated_bytes
    assert sum(block.requested for block in live) == allocator.requested_bytes
    assert allocator.allocated_bytes <= allocator.reserved_bytes


@settings(max_examples=60, deadline=None)
@given(ACTIONS, SETTINGS)
def test_everything_freed_can_be_given_back(
    actions: list[Action], chosen: AllocatorSettings
) -> None:
    """When nothing is used, releasing the cache leaves nothing reserved."""
    allocator = make_allocator(chosen)
    for block in run(allocator, actions):
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 0)
    assert allocator.reserved_bytes == 0


def test_an_adopted_segment_is_used_like_its_own() -> None:
    """A segment of a snapshot serves requests from its free pieces."""
    allocator = CachingAllocator()
    used, _ = allocator.adopt(20 * MIB, 3, [(4 * MIB, 4 * MIB, True), (16 * MIB, 0, False)])
    allocator.allocate(16 * MIB, stream=3)
    assert allocator.reserved_bytes == allocator.allocated_bytes == 20 * MIB
    allocator.free(used)
    assert allocator.allocated_bytes == 16 * MIB


def test_replay_counts_by_phase_and_honours_other_streams() -> None:
    """Peaks start anew with each phase; a host wait ends what another stream holds."""
    log = EventLog()
    log.begin_phase(0, Phase.FORWARD)
    first = log.allocate(30 * MIB)
    log.free(first)
    log.begin_phase(0, Phase.BACKWARD)
    log.free(log.allocate(30 * MIB))
    log.end_phase()
    prompt = replay_log(log)
    late = replay_log(log, None, StreamNotes(uses={first.id: {1}}))
    waited = replay_log(log, None, StreamNotes(uses={first.id: {1}}, waits=[(2, 2)]))
    assert [p.peak.allocated_bytes for p in prompt.phases] == [30 * MIB, 30 * MIB]
    assert prompt.peak_reserved_bytes == waited.peak_reserved_bytes == 30 * MIB
    assert late.peak_reserved_bytes == 60 * MIB
