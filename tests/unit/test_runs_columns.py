"""Long runs are read into columns: the same numbers as the careful reader's, or the careful one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_doctor.attribution.compare import compare_runs
from fsdp_doctor.attribution.payload import comparison_to_payload
from fsdp_doctor.attribution.stragglers import _peers_median
from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import RankSeries
from fsdp_doctor.report import facts
from fsdp_doctor.runs import RankWriter, load_run, reader, write_manifest
from fsdp_doctor.runs.columns import StepColumns, columns_from
from fsdp_doctor.runs.fast_reader import read_columns
from fsdp_doctor.runs.summary import resident_bytes, steady_peak_bytes

RECORDED = Path(__file__).parent.parent.parent / "profiles" / "h200"
FIELDS = [name for name in StepColumns.__slots__ if name not in ("load", "_built", "phases")]

sizes = st.none() | st.integers(0, 2**45)
phase = st.fixed_dictionaries(
    {
        "phase": st.sampled_from(["data", "forward", "backward", "optimizer", "unknown"]),
        "microbatch": st.integers(0, 1),
        "end": st.fixed_dictionaries({"allocated_bytes": sizes, "reserved_bytes": sizes}),
        "peak": st.fixed_dictionaries({"allocated_bytes": sizes, "reserved_bytes": sizes}),
    }
)
step = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["observed", "warmup", "timed", "checkpoint"]),
        "phases": st.lists(phase, max_size=5),
        "retries": st.none() | st.integers(0, 9),
        "device": sizes,
        "time": st.none() | st.floats(0, 10),
        "begins": st.booleans(),
        "ends": st.booleans(),
        "known": st.integers(0, 5),
    }
)


def write_rank(directory: Path, steps: list[dict], rank: int = 0) -> Path:
    """Write a rank's file as a recorder does; ``known``: phases whose times are told."""
    writer = RankWriter(directory, rank)
    writer.write("start", {"local_rank": 0, "host": "a", "pid": 1, "device": "cuda:0"})
    writer.write("phase", {"step": -1, "phase": "wrap", "end": {}, "peak": {}})
    for number, one in enumerate(steps):
        if one["begins"]:
            writer.write("begin", {"step": number, "kind": one["kind"], "gap_s": None})
        for part in one["phases"]:
            writer.write("phase", {"step": number, **part})
        if one["ends"]:
            counts = {"allocation_retries": one["retries"], "device_used_bytes": one["device"]}
            writer.write("step", {"step": number, "kind": one["kind"], **counts})
        times = [[p["phase"], p["microbatch"], 0.25] for p in one["phases"][: one["known"]]]
        writer.write("times", {"step": number, "step_time_s": one["time"], "phases": times})
    writer.write("phase", {"step": -2, "phase": "evaluation", "end": {}, "peak": {}})
    writer.write("end", {"time": 0.0})
    writer.close()
    return writer.path


def same_columns(a: StepColumns, b: StepColumns) -> None:
    """Assert that two columns hold the same numbers, whatever the order of their phases."""
    assert set(a.phases) == set(b.phases)
    order = [b.phases.index(name) for name in a.phases]
    for name in FIELDS:
        x, y = getattr(a, name), getattr(b, name)
        np.testing.assert_array_equal(x, y[order] if x.ndim == 2 else y, name)


@given(st.lists(step, max_size=6))
@settings(max_examples=150, deadline=None)
def test_both_readers_see_the_same(tmp_path_factory, steps):
    """Whatever is recorded; phases that come twice in a step are left to the careful reader."""
    path = write_rank(tmp_path_factory.mktemp("run"), steps)
    records = reader.load_steps(path, 0)
    fast = read_columns(path, lambda: records)
    places = [
        [(p["phase"], p["microbatch"]) for p in one["phases"][: one["known"]]] for one in steps
    ]
    whole = [[(p["phase"], p["microbatch"]) for p in one["phases"]] for one in steps]
    repeated = any(len(set(x)) < len(x) for x in (*places, *whole))
    assert (fast is None) == repeated
    if fast is not None:
        same_columns(fast.columns, columns_from(records))


@given(st.lists(step, max_size=6))
@settings(max_examples=60, deadline=None)
def test_reports_say_the_same_of_columns_as_of_records(tmp_path_factory, steps):
    """Peaks, what stays between steps, and times, without building a record."""
    path = write_rank(tmp_path_factory.mktemp("run"), steps)
    records = reader.load_steps(path, 0)
    columns = replace(columns_from(records), load=lambda: pytest.fail("records were built"))
    sides = [RankSeries(rank=0, steps=one) for one in (records, columns)]
    for counter in ("allocated_bytes", "reserved_bytes"):
        for name in (None, Phase.FORWARD, Phase.UNKNOWN):
            found = [steady_peak_bytes(side, name, counter) for side in sides]
            assert found[0] == found[1]
        assert resident_bytes(sides[0], counter) == resident_bytes(sides[1], counter)
    runs = [replace(make_run("a"), ranks=(side,)) for side in sides]
    assert facts.step_times(runs[0]) == facts.step_times(runs[1])
    assert facts.has_step_times(runs[0]) == facts.has_step_times(runs[1])


def test_reports_say_the_same_times_of_phases(tmp_path):
    """Micro steps added up."""
    parts = [
        {"phase": name, "microbatch": micro, "end": {}, "peak": {}}
        for name in ("forward", "backward")
        for micro in (0, 1)
    ]
    one = {"retries": 0, "device": None, "time": 1.0, "begins": True, "ends": True, "known": 4}
    steps = [{"kind": kind, "phases": parts, **one} for kind in ("warmup", "timed", "timed")]
    records = reader.load_steps(write_rank(tmp_path, steps), 0)
    runs = [
        replace(make_run("a"), ranks=(RankSeries(rank=0, steps=one),))
        for one in (records, columns_from(records))
    ]
    assert facts.phase_times(runs[0]) == facts.phase_times(runs[1])
    assert facts.phase_times(runs[0])[Phase.BACKWARD] == {1: {0: 0.5}, 2: {0: 0.5}}


@pytest.mark.parametrize("file", sorted(RECORDED.glob("world-2/fsdp2-*/rank-00000.jsonl"))[:6])
def test_recorded_runs_read_fast_as_they_do_carefully(file):
    """Real records of GPUs have nothing unusual."""
    records = reader.load_steps(file, 0)
    fast = read_columns(file, lambda: records)
    assert fast is not None
    same_columns(fast.columns, columns_from(records))
    kinds = {json.loads(line)["record"] for _, line in fast.others}
    assert {"start", "phase", "anatomy", "end"} <= kinds


@pytest.mark.parametrize(
    "line",
    [
        '{"record":"phase","step":0,"phase":"nowhere","end":{},"peak":{}}\n',
        '{"record":"step","step":"x"}\n',
        '{"record":"step","step":0,"kind":"timed","allocation_retries":99999999999999999999999}\n',
        '{"record":"failure","kind":"exception","message":"x"}\n',
        '{"record":"unheard of"}\n',
        '{"record":"step","step":0,"kind":"ti',
        "[]\n",
        "\n",
        "\xff\n",
    ],
)
def test_anything_unusual_is_left_to_the_careful_reader(line, tmp_path):
    """Which skips what is broken and says so."""
    path = write_rank(tmp_path, [])
    with path.open("a", encoding="latin-1") as stream:
        stream.write(line)
    assert read_columns(path, tuple) is None


def test_a_long_run_compares_as_a_short_one_does(tmp_path, monkeypatch):
    """Reading into columns, and by several processes, changes no number and no warning."""
    rng = np.random.default_rng(0)
    for side, scale in (("a", 1), ("b", 2)):
        (tmp_path / side).mkdir()
        write_manifest(tmp_path / side, make_run(side, world_size=2).manifest)
        for rank in range(2):
            steps = [
                {
                    "kind": "observed" if number == 0 else "timed",
                    "phases": [
                        {"phase": p, "microbatch": 0, "end": counters, "peak": counters}
                        for p, counters in (
                            (str(p), {"allocated_bytes": scale * (i + 1) << 30})
                            for i, p in enumerate((Phase.FORWARD, Phase.BACKWARD))
                        )
                    ],
                    "retries": number // 10,
                    "device": None,
                    "time": 0.1 + rng.random() / 100,
                    "begins": True,
                    "ends": True,
                    "known": 2,
                }
                for number in range(30)
            ]
            write_rank(tmp_path / side, steps, rank)
        with (tmp_path / side / "rank-00001.jsonl").open("a") as stream:
            stream.write('{"record":"warning","text":"look"}\n')

    def payload():
        runs = [[load_run(tmp_path / side)] for side in "ab"]
        comparison = compare_runs(*runs)
        return comparison_to_payload(comparison), comparison.warnings, runs[0][0]

    careful, warnings, run = payload()
    assert not isinstance(run.ranks[0].steps, StepColumns)
    monkeypatch.setattr(reader, "LONG_BYTES", 1)
    monkeypatch.setattr(reader, "PARALLEL_BYTES", 1)
    monkeypatch.setattr(reader, "_workers", lambda files: 2)
    fast, fast_warnings, run = payload()
    assert isinstance(run.ranks[0].steps, StepColumns)
    assert (fast, fast_warnings) == (careful, warnings)
    assert any("rank 1: look" in warning for warning in warnings)
    assert [s.step for s in run.ranks[0].steps] == list(range(30))
    assert run.ranks[0].steps[3].phases[1].time_s == 0.25


@pytest.mark.parametrize("ranks", [2, 3, 8, 9])
def test_the_median_of_the_others(ranks):
    """As leaving each rank out and taking the median, ties included."""
    own = np.random.default_rng(ranks).integers(0, 4, (ranks, 20)).astype(float)
    expected = [np.median(np.delete(own, r, axis=0), axis=0) for r in range(ranks)]
    np.testing.assert_array_equal(_peers_median(own), expected)
