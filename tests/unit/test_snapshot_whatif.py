"""Replaying a refused request under other allocator settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import snapshot_maker as maker
from hypothesis import given, settings
from hypothesis import strategies as st
from test_oom_diagnosis import message
from test_oom_snapshots import Job, forward, fragmentation

from fsdp_doctor.memory.caching_allocator import AllocatorSettings, Block, OutOfMemoryModelled
from fsdp_doctor.memory.expandable_segments import make_allocator
from fsdp_doctor.memory.snapshot_analysis import analyse_snapshot
from fsdp_doctor.memory.snapshot_whatif import (
    AS_IT_RAN,
    EXPANDABLE,
    recorded_settings,
)
from fsdp_doctor.model.replay import AllocatorReplay
from fsdp_doctor.postmortem import examine

MiB = maker.MiB
REAL = Path(__file__).parents[3] / "shared" / "snapshots"


def replayed(job: maker.Maker, tmp_path: Path) -> AllocatorReplay:
    """The replay of a job's refused request."""
    found = analyse_snapshot(maker.write(job.snapshot(), tmp_path / "s.pickle")).replay
    assert found is not None
    return found


def outcomes(replay: AllocatorReplay) -> dict[str, str]:
    """Setting -> outcome."""
    return {change.setting: change.outcome for change in replay.changes}


def test_pieces_are_joined_by_expandable_segments(tmp_path):
    """Pinned pieces of twelve segments, unmapped, serve a request that none of them could."""
    replay = replayed(fragmentation(), tmp_path)
    found = outcomes(replay)
    assert (found[AS_IT_RAN], found[EXPANDABLE]) == ("fails", "fits")
    expandable, ran = replay.of(EXPANDABLE), replay.of(AS_IT_RAN)
    assert 0 < expandable.margin_bytes <= replay.capacity_bytes - replay.floor_bytes
    assert ran.margin_bytes < 0
    assert replay.assumed_bytes == 0


def test_full_memory_is_saved_by_no_setting(tmp_path):
    """Where blocks in use and the request exceed what there is, every setting fails."""
    replay = replayed(forward(), tmp_path)
    assert replay.floor_bytes > replay.capacity_bytes
    assert set(outcomes(replay).values()) == {"fails"}
    assert all(change.margin_bytes < 0 for change in replay.changes)


def test_late_trace_says_nothing_of_another_layout(tmp_path):
    """With most blocks older than the trace the layout under other settings is not known."""
    job = fragmentation()
    snapshot = job.snapshot()
    trace = snapshot["device_traces"][0]
    del trace[:-6]
    path = maker.write(snapshot, tmp_path / "s.pickle")
    replay = analyse_snapshot(path).replay
    assert outcomes(replay)[EXPANDABLE] == "unknown"
    assert "too late" in replay.of(EXPANDABLE).reason


def test_rest_of_the_step_is_told(tmp_path):
    """What earlier steps needed beyond the refused moment is told beside the margin."""
    job = Job(state=10).steps(3, activation=40)
    job.maker.note("DistributedDataParallel.forward")
    replay = replayed(job.refuse(40), tmp_path)
    assert replay.rest_of_step_bytes > 8 * 40 * MiB


def test_limit_of_the_message_counts(tmp_path):
    """The message's limit of the process is what could be reserved, the snapshot's only a least."""
    job = fragmentation()
    job.trace[-1]["device_free"] = 1 << 40  # the device has room, a limit is what was reached
    path = maker.write(job.snapshot(), tmp_path / "rank0.pickle")
    before = analyse_snapshot(path).replay
    assert before.capacity_is_least
    assert outcomes(before)[EXPANDABLE] == "unknown"
    log = tmp_path / "rank0.log"
    limit = (before.capacity_bytes + 100 * MiB) / (1 << 30)
    text = message(ask="0.20", live="0.50")
    log.write_text(text.replace("Of the all", f"{limit:.2f} GiB allowed; Of the all") + "\n")
    after = examine([log], snapshots=[path]).snapshot.replay
    assert not after.capacity_is_least
    assert abs(after.capacity_bytes - limit * (1 << 30)) <= 6 * MiB
    assert outcomes(after)[EXPANDABLE] == "fits"
    assert outcomes(after)[AS_IT_RAN] == "fails"


@pytest.mark.skipif(not REAL.is_dir(), reason="real snapshots are not beside the checkout")
@pytest.mark.parametrize("name", ["ddp_oom", "fsdp2_oom"])
def test_model_repeats_real_failures(name):
    """Recorded on H200s: the model fails at the same request with the same bytes reserved."""
    found = analyse_snapshot(REAL / f"{name}.pickle")
    ran = found.replay.of(AS_IT_RAN)
    assert ran.outcome == "fails"
    assert ran.reason == ""
    assert ran.peak_reserved_bytes == found.peak_reserved_bytes
    assert ran.margin_bytes == -found.oom.driver_bytes


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 64 * MiB), st.sampled_from([0, 7])), max_size=60
    )
)
@settings(max_examples=40, deadline=None)
def test_pages_are_never_counted_twice(actions):
    """Reserved memory stays between what is in use and the limit, and a full release gives back
    what was said to be releasable.
    """
    limit = 400 * MiB
    allocator = make_allocator(AllocatorSettings(capacity_bytes=limit, expandable_segments=True))
    held: list[Block] = []
    for frees, size, stream in actions:
        if frees and held:
            allocator.free(held.pop(size % len(held)))
        else:
            try:
                held.append(allocator.allocate(size, stream))
            except OutOfMemoryModelled:
                continue
        assert allocator.active_bytes <= allocator.reserved_bytes <= limit
    for block in held[::2]:
        allocator.free(block)
    allocator.release_cached()
    assert allocator.reserved_bytes >= allocator.active_bytes
    assert allocator.release_cached() == 0
    for block in held[1::2]:
        allocator.free(block)
    allocator.release_cached()
    pages = 2 * (20 + 2) * MiB  # a rest of each pool and stream, less than a page beside holes
    assert allocator.reserved_bytes <= len(held) * pages


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, AllocatorSettings()),
        ({"expandable_segments": True}, AllocatorSettings(expandable_segments=True)),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:256,roundup_power2_divisions:8"},
            AllocatorSettings(max_split_size_bytes=256 * MiB, roundup_power2_divisions=8),
        ),
        ({"max_split_size": 64 * MiB}, AllocatorSettings(max_split_size_bytes=64 * MiB)),
        ({"max_split_size": -1, "PYTORCH_CUDA_ALLOC_CONF": "new_thing:1"}, AllocatorSettings()),
    ],
)
def test_settings_that_a_snapshot_tells(told, expected):
    """The written text and the keys of newer versions give the settings it ran with."""
    assert recorded_settings(told) == expected
