"""Reading a rank's records: parts of phases, late times, warnings, kinds."""

from __future__ import annotations

from pathlib import Path

from fsdp_doctor.model.memory import MemoryCounters
from fsdp_doctor.model.run import RankSeries, Run, RunManifest
from fsdp_doctor.runs import SCHEMA, RankWriter, load_run, write_manifest


def read(folder: Path, *records: tuple[str, dict[str, object]]) -> tuple[Run, RankSeries]:
    """Write a run of one rank with these records and read it."""
    writer = RankWriter(folder, 0)
    for name, fields in records:
        writer.write(name, fields)
    writer.close()
    manifest = RunManifest(
        schema=SCHEMA,
        name="run",
        tool_version="0",
        created="2026-01-01T00:00:00+00:00",
        status="completed",
        source="real_ranks",
        world_size=1,
        ranks=(0,),
        device_type="cpu",
    )
    write_manifest(folder, manifest)
    run = load_run(folder)
    return run, run.ranks[0]


def phase(step: int, name: str, end: int, peak: int) -> tuple[str, dict[str, object]]:
    """Return a phase record."""
    counters = {"end": {"allocated_bytes": end}, "peak": {"allocated_bytes": peak}}
    return "phase", {"step": step, "phase": name, "microbatch": 0, **counters}


def test_parts_of_a_phase_are_joined(tmp_path: Path) -> None:
    """A phase that comes twice in a step has the last end, the largest peak and the summed time."""
    times = {"step": 0, "step_time_s": 1.0, "phases": [["forward", 0, 0.25], ["forward", 0, 0.5]]}
    _, series = read(
        tmp_path,
        phase(0, "forward", 10, 90),
        phase(0, "backward", 5, 95),
        phase(0, "forward", 20, 80),
        ("step", {"step": 0, "kind": "timed"}),
        ("times", times),
    )
    forward, backward = series.steps[0].phases
    assert (forward.end, forward.peak) == (
        MemoryCounters(allocated_bytes=20),
        MemoryCounters(allocated_bytes=90),
    )
    assert (forward.time_s, backward.time_s) == (0.75, None)


def test_times_of_set_up_come_in_parts(tmp_path: Path) -> None:
    """A second record of set-up times adds to the first, and equal phases keep their own."""
    _, series = read(
        tmp_path,
        phase(-1, "init", 1, 1),
        phase(-1, "load", 2, 2),
        ("times", {"step": -1, "phases": [["init", 0, 0.25], ["load", 0, 0.5]]}),
        phase(-1, "load", 3, 3),
        ("times", {"step": -1, "phases": [["load", 0, 1.0]]}),
        phase(-2, "evaluation", 4, 4),
        ("times", {"step": -2, "phases": [["evaluation", 0, 2.0]]}),
    )
    assert [p.time_s for p in series.setup] == [0.25, 0.5, 1.0]
    assert [p.time_s for p in series.outside] == [2.0]
    assert series.steps == ()


def test_an_unfinished_step_is_of_its_kind(tmp_path: Path) -> None:
    """What a step began as holds when it never ended, with the counts of its failing moment."""
    counts = {"allocation_retries": 2, "out_of_memory_count": 1}
    _, series = read(
        tmp_path,
        ("begin", {"step": 0, "kind": "observed", "gap_s": 0.5}),
        ("failure", {"kind": "device_oom", "message": "", "step": 0, "phase": "forward", **counts}),
    )
    (step,) = series.steps
    assert (step.kind, step.gap_s, step.out_of_memory_count) == ("observed", 0.5, 1)
    assert step.allocation_retries == 2


def test_warnings_of_a_rank_are_warnings_of_the_run(tmp_path: Path) -> None:
    """A rank's warning record is read into the manifest."""
    run, _ = read(tmp_path, ("warning", {"text": "no longer observed"}))
    assert run.manifest.warnings == ("rank 0: no longer observed",)
