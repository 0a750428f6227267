"""What a snapshot tells: timeline, categories, growth, fragmentation, the request that failed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import snapshot_maker as maker
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st

from fsdp_doctor.memory.cuda_phases import infer_marks
from fsdp_doctor.memory.cuda_trace import read_history
from fsdp_doctor.memory.snapshot_analysis import (
    analyse_ranks,
    analyse_snapshot,
    analyse_view,
    load_view,
    worst,
)
from fsdp_doctor.memory.snapshot_files import find_snapshots, is_snapshot
from fsdp_doctor.memory.snapshot_reader import read_snapshot
from fsdp_doctor.memory.snapshot_space import driver_bytes
from fsdp_doctor.memory.timeline import alive, by_category, level_curve
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.postmortem.diagnose import diagnose_snapshot

MiB = maker.MiB
REAL = Path(__file__).parents[3] / "shared" / "snapshots"
needs_real = pytest.mark.skipif(
    not REAL.is_dir(), reason="real snapshots are not beside the checkout"
)


@pytest.fixture(name="analyse")
def analyse_fixture(tmp_path):
    """A function from a maker to its analysis."""

    def run(job: maker.Maker):
        path = maker.write(job.snapshot(), tmp_path / "s.pickle")
        return diagnose_snapshot(analyse_snapshot(path))

    return run


def test_training_is_understood(analyse):
    """Steps, phases and the categories at the peak of a DDP job."""
    found = analyse(maker.training(3))
    assert [step.step for step in found.steps] == [0, 1, 2]
    assert all(step.complete for step in found.steps)
    assert found.peak.phase is Phase.BACKWARD
    assert found.peak.step == 1
    assert found.peak.categories == {
        "activations": 16 * MiB,
        "optimizer_state": 16 * MiB,
        "parameters": 8 * MiB,
        "gradients": 4 * MiB,
        "logits": 2 * MiB,
        "temporaries": 512,
    }
    assert sum(found.peak.categories.values()) == found.peak.allocated_bytes
    assert found.end.categories == {"optimizer_state": 16 * MiB, "parameters": 8 * MiB}
    assert not found.warnings
    assert not found.growth.leaking


def test_every_moment_has_its_categories(tmp_path):
    """At every position the categories add up to what is allocated."""
    path = maker.write(maker.training(2, leak=MiB).snapshot(), tmp_path / "s.pickle")
    view = load_view(path)
    import numpy as np

    positions = np.arange(view.replay.end + 1)
    sums = view.categories_at(positions)
    assert (sums >= 0).all()
    assert (sums.sum(axis=0) == view.replay.allocated).all()


def test_leak_is_found_with_its_code(analyse):
    """Memory kept in every step is a leak, and the stack that keeps it is named."""
    found = analyse(maker.training(6, leak=3 * MiB))
    assert found.growth.leaking
    assert found.growth.per_step_bytes == 3 * MiB
    assert found.growth.suspects[0].count == 5 - 1
    assert "metrics.py:7 remember" in found.growth.suspects[0].frames
    assert found.findings[0].cause == "leak"


def test_a_cache_is_no_leak(analyse):
    """What the first steps leave behind and later ones do not is no leak."""
    job = maker.training(1)
    job.alloc(64 * MiB, "keep")
    later = maker.training(5)
    assert not analyse(later).growth.leaking
    assert not (analyse(job).growth or analyse(later).growth).leaking


def test_failed_request_is_explained(analyse):
    """The request, what was free, and what filled the memory."""
    found = analyse(maker.training(3, oom=True, activation=32 * MiB))
    assert found.oom.requested_bytes == 64 * MiB
    assert found.oom.driver_bytes == 64 * MiB
    assert found.oom.device_free_bytes == MiB
    assert found.oom.verdict == "full"
    assert found.failure.phase is Phase.FORWARD
    assert found.failure.step == 2
    assert found.focus is found.failure
    assert found.findings[0].cause == "activations"
    assert found.findings[0].severity == "error"


def test_fragmentation_is_explained(analyse):
    """Free pieces that add up but do not fit: who pins them, and that pieces are the cause."""
    job = maker.Maker()
    fillers = []
    for _ in range(6):
        job.free(job.alloc(16 * MiB))
        job.alloc(2 * MiB, "keep")
        fillers.append(job.alloc(13 * MiB))
    job.free(*fillers)
    job.oom(40 * MiB)
    found = analyse(job)
    assert found.oom.verdict == "fragmented"
    assert found.oom.free_bytes >= 40 * MiB > found.oom.largest_free_bytes
    assert found.findings[0].cause == "fragmentation"
    assert found.space.pinned[0].pinned_by.frames[2] == "metrics.py:7 remember"


def test_memory_of_another_stream_is_named(analyse):
    """A fitting free piece of another stream cannot serve the request."""
    job = maker.Maker()
    job.alloc(10 * MiB)
    job.free(job.alloc(64 * MiB, "gather", stream=77))
    job.oom(48 * MiB)
    found = analyse(job)
    assert found.oom.elsewhere_bytes == 64 * MiB
    assert found.oom.verdict == "other_pool"
    assert "stream-reuse" in [finding.cause for finding in found.findings]
    assert {pool.stream for pool in found.space.pools} == {0, 77}


def test_private_pool_is_named(analyse):
    """A fitting free piece of a CUDA graph's pool is named as such."""
    job = maker.Maker()
    job.alloc(10 * MiB)
    job.free(job.alloc(600 * MiB, pool=(0, 3)))
    job.oom(48 * MiB)
    assert "cuda-graph-pools" in [finding.cause for finding in analyse(job).findings]


def test_waiting_frees_are_active(analyse):
    """Blocks that another stream still uses are active, not allocated."""
    job = maker.Maker()
    job.alloc(30 * MiB)
    job.free(job.alloc(200 * MiB, "gather"), complete=False)
    job.oom(64 * MiB)
    found = analyse(job)
    assert found.failure.active_bytes - found.failure.allocated_bytes == 200 * MiB
    assert found.findings[0].cause == "stream-reuse"


def test_limit_of_the_process_is_told(analyse):
    """A device with room that refuses: a limit of the process."""
    job = maker.Maker()
    job.alloc(30 * MiB)
    job.oom(64 * MiB, device_free=100 * MiB)
    found = analyse(job)
    assert found.oom.verdict == "limit"
    assert "memory-limit" in [finding.cause for finding in found.findings]


@pytest.mark.parametrize(
    ("request_bytes", "asked"),
    [(1, 2 * MiB), (MiB, 2 * MiB), (MiB + 1, 20 * MiB), (10 * MiB, 10 * MiB), (11 * MiB, 12 * MiB)],
)
def test_driver_is_asked_for_segments(request_bytes, asked):
    """The driver's request is a whole segment."""
    assert driver_bytes(request_bytes) == asked


def test_units_of_fsdp2_are_told(analyse):
    """The annotations of FSDP2 give unit and step of what they gather."""
    job = maker.Maker()
    job.note("FSDP::root_pre_forward")
    job.note("FSDP::all_gather (blocks.3)")
    job.alloc(256 * MiB, "gather")
    job.note("FSDP::all_gather (blocks.3)", start=False)
    found = analyse(job)
    assert found.peak.unit == "blocks.3"
    assert found.peak.top_allocations[0].module == "blocks.3"
    assert found.peak.top_allocations[0].category is Category.COMMUNICATION


def test_phases_come_from_stacks_without_annotations(analyse):
    """Where nothing is annotated, the stacks tell forward, backward and optimizer apart."""
    job = maker.training(3)
    job.notes.clear()
    found = analyse(job)
    assert [step.step for step in found.steps] == [0, 1, 2]
    assert found.peak.phase is Phase.BACKWARD


def test_names_of_profilers_are_known(analyse):
    """The ranges that profilers and trainers name mean the same phases."""
    job = maker.training(2)
    names = {"DistributedDataParallel.forward": "## forward ##"}
    for note in job.notes:
        note["name"] = names.get(note["name"], note["name"])
    assert len(analyse(job).steps) == 2


def legacy(version: str) -> object:
    """A snapshot as an old torch wrote it."""
    snapshot = maker.training(2).snapshot()
    for segment in snapshot["segments"]:
        for key in ("segment_pool_id", "is_expandable", "frames", "requested_size"):
            segment.pop(key)
        for block in segment["blocks"]:
            if version != "2.1":
                frames, size = block.pop("frames"), block.pop("requested_size")
                block.pop("address")
                if block["state"] != "inactive":
                    block["history"] = [{"addr": 0, "real_size": size, "frames": frames}]
    del snapshot["external_annotations"]
    for entry in snapshot["device_traces"][0]:
        for key in ("time_us", "compile_context", "user_metadata", "pool_id"):
            entry.pop(key, None)
    if version == "1.13":
        return snapshot["segments"]
    return snapshot


@pytest.mark.parametrize("version", ["1.13", "2.0", "2.1"])
def test_old_versions_are_read(version, tmp_path):
    """The list of torch 1.13, the histories of 2.0, the traces without a clock of 2.1."""
    found = analyse_snapshot(maker.write(legacy(version), tmp_path / "s.pickle"))
    assert found.end.allocated_bytes == 24 * MiB
    tops = found.end.top_allocations or found.peak.top_allocations
    assert any("adam.py:180 _init_group" in frame for top in tops for frame in top.frames)
    if version == "1.13":
        assert found.events == 0
        assert "no events" in found.warnings[0]
    else:
        assert len(found.steps) == 2


def test_new_versions_are_read(tmp_path):
    """Keys and actions that are not known yet are passed over."""
    snapshot = maker.training(2).snapshot()
    trace = snapshot["device_traces"][0]
    trace.insert(3, {"action": "annotate", "size": 0, "time_us": 5, "addr": 0, "new": {}})
    trace.insert(9, {"action": "workspace_snapshot"})
    trace.append({"action": "snapshot", "addr": 0, "size": 7, "stream": 0, "time_us": 9})
    trace[4]["forward_frames"] = ["text"]
    snapshot |= {"host_segments": [], "host_traces": [], "later": {1: {2}}}
    found = analyse_snapshot(maker.write(snapshot, tmp_path / "s.pickle"))
    assert found.end.allocated_bytes == 24 * MiB


def test_frees_without_allocation_are_older(tmp_path):
    """A ring that lost its oldest events: what is freed later was alive before."""
    snapshot = maker.training(3).snapshot()
    whole = analyse_snapshot(maker.write(snapshot, tmp_path / "s.pickle"))
    trace = snapshot["device_traces"][0]
    del trace[: len(trace) // 2]
    cut = analyse_snapshot(maker.write(snapshot, tmp_path / "s.pickle"))
    assert cut.end.allocated_bytes == whole.end.allocated_bytes
    assert cut.steps[-1].peak_allocated_bytes == whole.steps[-1].peak_allocated_bytes


def test_gzip_is_read(tmp_path):
    """A compressed snapshot says the same."""
    snapshot = maker.training(2).snapshot()
    plain = analyse_snapshot(maker.write(snapshot, tmp_path / "s.pickle"))
    packed = analyse_snapshot(maker.write(snapshot, tmp_path / "s.pickle.gz"))
    assert packed.peak == plain.peak
    assert packed.focus == plain.focus


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3_memory_snapshot.pickle", 3),
        ("000003_step_40.pickle", 3),
        ("snapshot_3.pickle", 3),
        ("snapshot_oom_rank-3.pickle", 3),
        ("ep0-ba12-rank3.memory_snapshot.pickle", 3),
        ("oom_rank_3.pkl.gz", 3),
        ("3.pickle", 3),
        ("memory.pickle", None),
    ],
)
def test_rank_is_in_the_name(name, rank, tmp_path):
    """File names of torchtitan, Megatron-Bridge, Composer and plain ones give the rank."""
    maker.write({"segments": []}, tmp_path / name)
    assert [file.rank for file in find_snapshots(tmp_path)] == [rank]
    assert is_snapshot(tmp_path / name)
    assert is_snapshot(tmp_path)


def test_directory_of_ranks(tmp_path):
    """The last snapshot of each rank of the last step is read; the failed rank is shown."""
    for step in (10, 20):
        folder = tmp_path / f"step_{step:012d}"
        folder.mkdir()
        for rank in (0, 1):
            job = maker.training(2, oom=rank == 1, activation=rank * MiB + step * MiB)
            maker.write(job.snapshot(), folder / f"rank{rank}_memory_snapshot.pickle")
    (tmp_path / "notes.txt").write_text("x")
    found = analyse_ranks(tmp_path)
    assert [a.rank for a in found] == [0, 1]
    assert all("step_000000000020" in a.path for a in found)
    assert worst(found).rank == 1


def test_unreadable_rank_is_a_warning(tmp_path):
    """One broken file of a directory does not hide the others."""
    maker.write(maker.training(2).snapshot(), tmp_path / "rank0.pickle")
    (tmp_path / "rank1.pickle").write_bytes(b"\x80\x04")
    found = analyse_ranks(tmp_path)
    assert len(found) == 1
    assert "rank1.pickle" in found[0].warnings[-1]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "alloc", "free", "wait", "note"]),
        st.integers(1, 40 * MiB),
        st.sampled_from(["forward", "build", "loss", "state", "gather", "keep", "grads"]),
        st.sampled_from([0, 9]),
    ),
    min_size=1,
    max_size=40,
)
NAMES = ("DistributedDataParallel.forward", "Optimizer.step#X", "FSDP::pre_forward (a.1)")


def random_job(actions) -> maker.Maker:
    """A job that does these things."""
    job, alive_now = maker.Maker(), []
    for action, size, stack, stream in actions:
        if action == "alloc" or (action != "note" and not alive_now):
            alive_now.append(job.alloc(size, stack, stream=stream))
        elif action == "note":
            job.note(NAMES[size % 3], start=size % 2 == 0)
        else:
            job.free(alive_now.pop(size % len(alive_now)), complete=action == "free")
    return job


@given(actions=ACTIONS, cut=st.integers(0, 20))
@settings(
    max_examples=25,
    deadline=None,
    phases=[Stage.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_columns_agree_with_the_reader_of_dicts(actions, cut, tmp_path):
    """The replay in columns gives the curve and the categories of ``read_history``."""
    snapshot = random_job(actions).snapshot()
    del snapshot["device_traces"][0][:cut]
    snapshot["external_annotations"] = [
        note for note in snapshot["external_annotations"] if "FSDP" not in note["name"]
    ]
    if not snapshot["device_traces"][0]:
        return
    path = maker.write(snapshot, tmp_path / "s.pickle")
    view = load_view(path)
    history = read_history(pickle.loads(path.read_bytes()), 0, infer_marks(snapshot, 0))
    curve = level_curve(history.log)
    rest = int(view.replay.blocks.rest.sum())
    assert max(curve) <= view.replay.allocated.max() <= max(curve) + rest
    end = view.moment("end", view.replay.end)
    assert end.allocated_bytes - end.categories.get("rounding", 0) == curve[-1]
    theirs = by_category(alive(history.log, history.log.position))
    assert set(end.categories) - {"rounding"} <= {*theirs, *map(str, Category)}


@given(actions=ACTIONS, failed=st.integers(1, 64 * MiB))
@settings(
    max_examples=30,
    deadline=None,
    phases=[Stage.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_space_adds_up(actions, failed, tmp_path):
    """Free and active memory are the reserved memory, and the largest hole is one of them."""
    job = random_job(actions)
    job.oom(failed)
    view = load_view(maker.write(job.snapshot(), tmp_path / "s.pickle"))
    found = analyse_view(view)
    reserved = sum(pool.reserved_bytes for pool in found.space.pools)
    assert reserved == found.focus.reserved_bytes == int(view.replay.reserved[-1])
    assert found.focus.allocated_bytes <= found.focus.active_bytes <= reserved
    for pool in found.space.pools:
        assert 0 <= pool.largest_free_bytes <= pool.free_bytes <= pool.reserved_bytes
    assert found.oom.largest_free_bytes <= found.oom.free_bytes
    assert (found.oom.verdict == "fitting") == (found.oom.largest_free_bytes >= failed)


@needs_real
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "ddp_oom", "fsdp2_oom"])
def test_real_snapshots(name):
    """Recorded on two H200s: curves to the byte, phases and causes."""
    found = diagnose_snapshot(analyse_snapshot(REAL / f"{name}.pickle"))
    snapshot = read_snapshot(REAL / f"{name}.pickle")
    block = snapshot.blocks
    active = int(block["size"][block["state"] != 0].sum())
    assert found.end.active_bytes == active
    assert found.end.reserved_bytes == int(snapshot.segments["size"].sum())
    assert sum(found.focus.categories.values()) == found.focus.allocated_bytes
    if name.endswith("oom"):
        assert found.oom.count == 1
        assert found.failure.phase is Phase.FORWARD
        assert found.findings[0].cause == "activations"
        assert "memory-limit" in [finding.cause for finding in found.findings]
    else:
        assert len(found.steps) == 6
        assert found.peak.phase is Phase.BACKWARD
        assert not found.growth.leaking


@needs_real
def test_real_snapshots_agree_with_the_reader_of_dicts():
    """On real traces the classified blocks at the peak are those of ``read_history``, which knows
    logits by the loss alone and not by their size.
    """
    path = REAL / "ddp.pickle"
    found = analyse_snapshot(path)
    snapshot = pickle.loads(path.read_bytes())
    history = read_history(snapshot, 0, infer_marks(snapshot, 0))
    curve = level_curve(history.log)
    assert max(curve) == found.peak.allocated_bytes
    known, shown = by_category(alive(history.log, curve.index(max(curve)))), found.peak.categories
    assert known["logits"] < shown["logits"]
    together = known.pop("logits") + known.pop("activations")
    rest = {name: size for name, size in shown.items() if name not in ("logits", "activations")}
    assert shown["logits"] + shown["activations"] == together
    assert rest == known


def test_pages_of_an_expandable_segment_are_one_piece(tmp_path):
    """What was unmapped after the failure was one free piece with what lay beside it before."""
    job = maker.Maker()
    job.alloc(4 * MiB)
    segment = job.segments[0]  # 20 MiB: one page of an expandable segment
    job.event("segment_map", segment.address + segment.size, 20 * MiB)
    job.oom(64 * MiB)
    job.event("segment_unmap", segment.address + segment.size, 20 * MiB)
    snapshot = job.snapshot()
    snapshot["device_traces"][0][0]["action"] = "segment_map"
    for one in snapshot["segments"]:
        one["is_expandable"] = True
    found = analyse_snapshot(maker.write(snapshot, tmp_path / "s.pickle"))
    assert found.oom.largest_free_bytes == found.oom.free_bytes == 36 * MiB
    assert found.focus.reserved_bytes == 40 * MiB
    assert len(found.space.pools) == 1
