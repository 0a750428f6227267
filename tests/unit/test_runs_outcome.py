"""How a run ended, told from its ranks where run.json cannot know."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from fsdp_doctor.model.run import Failure, RunManifest, RunStatus
from fsdp_doctor.runs import SCHEMA, RankWriter, load_run, write_manifest
from fsdp_doctor.runs.heartbeat import HeartbeatWriter, heartbeat_path

End = Literal["end", "failure", "interrupt", "nothing"]


@pytest.fixture(scope="module")
def dead_pid() -> int:
    """The number of a process that is gone."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def write_rank(folder: Path, rank: int, end: End, pid: int, **start: Any) -> None:
    """Write a rank's file: a start, a step, and an end of some kind."""
    writer = RankWriter(folder, rank)
    first = {"host": socket.gethostname(), "pid": pid, "device": "cpu", "time": time.time()}
    writer.write("start", {"local_rank": rank, **first, **start})
    writer.write("begin", {"step": 0, "kind": "observed", "gap_s": None})
    if end == "end":
        writer.write("end", {"time": time.time()})
    elif end != "nothing":
        kind = "interrupted" if end == "interrupt" else "exception"
        content = {"kind": kind, "message": "ValueError: no", "step": 0, "phase": "forward"}
        writer.write("failure", {**content, "frames": [], "time": time.time()})
    writer.close()


def write_run(folder: Path, status: RunStatus, ends: list[End], pid: int) -> None:
    """Write a run of the user's own loop whose ranks ended so."""
    for rank, end in enumerate(ends):
        write_rank(folder, rank, end, pid)
    manifest = RunManifest(
        schema=SCHEMA,
        name="own",
        tool_version="0",
        created="2026-01-01T00:00:00+00:00",
        status=status,
        source="recorded",
        world_size=len(ends),
        ranks=tuple(range(len(ends))),
        device_type="cpu",
    )
    write_manifest(folder, manifest)


def outcome(folder: Path) -> tuple[RunStatus, Failure | None]:
    """Read back how the run ended."""
    manifest = load_run(folder).manifest
    return manifest.status, manifest.failure


@pytest.mark.parametrize(
    ("written", "ends", "told"),
    [
        ("running", ["nothing", "failure"], ("failed", 1, (0,))),
        ("running", ["end", "failure"], ("failed", 1, ())),
        ("running", ["nothing", "interrupt"], ("interrupted", 1, (0,))),
        ("running", ["end", "end"], ("completed", None, ())),
        ("running", ["end", "nothing"], ("failed", 1, ())),
        ("completed", ["end", "failure"], ("failed", 1, ())),
        ("completed", ["end", "nothing"], ("failed", 1, ())),
        ("completed", ["end", "end"], ("completed", None, ())),
    ],
)
def test_the_ranks_tell_how_it_ended(
    tmp_path: Path,
    dead_pid: int,
    written: RunStatus,
    ends: list[End],
    told: tuple[RunStatus, int | None, tuple[int, ...]],
) -> None:
    """With all ranks gone the run is what they wrote, whatever rank 0 could say."""
    write_run(tmp_path, written, ends, dead_pid)
    status, failure = outcome(tmp_path)
    rank, victims = (failure.rank, failure.victims) if failure else (None, ())
    assert (status, rank, victims) == told


def test_a_run_with_a_living_rank_is_running(tmp_path: Path, dead_pid: int) -> None:
    """While a rank is alive nobody calls the run failed."""
    write_run(tmp_path, "running", ["nothing"], os.getpid())
    assert outcome(tmp_path) == ("running", None)
    write_rank(tmp_path, 0, "nothing", dead_pid)
    assert outcome(tmp_path)[0] == "failed"


def test_another_process_of_the_same_number_is_not_the_rank(tmp_path: Path) -> None:
    """A process that is younger than the record of the rank only has its number."""
    write_run(tmp_path, "running", [], 0)
    write_run(tmp_path, "running", ["nothing"], os.getpid())
    rank_file = tmp_path / "rank-00000.jsonl"
    rank_file.unlink()
    write_rank(tmp_path, 0, "nothing", os.getpid(), time=time.time() - 1e6)
    assert outcome(tmp_path)[0] == "failed"


def test_ranks_of_other_hosts_may_be_alive(tmp_path: Path, dead_pid: int) -> None:
    """What cannot be looked at is not declared dead."""
    write_run(tmp_path, "running", ["end"], dead_pid)
    (tmp_path / "rank-00000.jsonl").unlink()
    write_rank(tmp_path, 0, "nothing", dead_pid, host="elsewhere")
    assert outcome(tmp_path) == ("running", None)


def test_a_killed_rank_leaves_its_place(tmp_path: Path, dead_pid: int) -> None:
    """The heartbeat of a process that left no word says where it was."""
    write_run(tmp_path, "running", ["nothing"], dead_pid)
    beat = HeartbeatWriter(tmp_path, 0)
    beat.beat(7, "backward")
    beat.close()
    failure = outcome(tmp_path)[1]
    assert failure is not None
    assert (failure.kind, failure.step, failure.phase) == ("exit", 7, "backward")
    heartbeat_path(tmp_path, 0).write_text(f"7 nonsense 1.0 {dead_pid}\n")
    run = load_run(tmp_path)
    assert run.manifest.status == "running"
    assert "how the run ended cannot be read" in run.manifest.warnings[0]
