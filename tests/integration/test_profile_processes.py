"""``profile`` on real processes: two gloo ranks, and every way in which they can end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.profiler.supervise import process_alive
from fsdp_doctor.runs import load_run
from fsdp_doctor.runs.heartbeat import read_heartbeat
from fsdp_doctor.runs.reader import read_records

ROOT = Path(__file__).parent.parent.parent

SECRET = "hf_abcdefghijklmnopqrstuvwx"
"""Passed to the model's factory; must not be found in a run directory."""

SPEC = """
name: {name}
world_size: 2
workload:
  model:
    factory: tests.user_models:build
    batch: tests.user_models:batch
    loss: tests.user_models:loss
    kwargs: {kwargs}
  micro_batch: 4
  sequence_length: 8
config:
  strategy: {strategy}
steps: {{warmup: 5, timed: {timed}, kernel_profile: false}}
"""


def write_spec(
    folder: Path, name: str, strategy: str = "ddp", kwargs: str = "{}", timed: int = 3
) -> Path:
    """Write a spec of the test model."""
    path = folder / f"{name}.yaml"
    path.write_text(SPEC.format(name=name, strategy=strategy, kwargs=kwargs, timed=timed))
    return path


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start ``fsdp-doctor profile`` as a user would."""
    return subprocess.Popen(
        [sys.executable, "-m", "fsdp_doctor", "profile", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rank_pids(run: Path) -> list[int]:
    """Return the pids that the ranks of a run wrote down."""
    return [
        record["pid"]
        for rank in (0, 1)
        for record in read_records(run, rank)
        if record["record"] == "start"
    ]


def assert_all_gone(pids: list[int]) -> None:
    """Check that no rank process is left."""
    assert len(pids) == 2
    assert not [pid for pid in pids if process_alive(pid)]


def wait_for_step(run: Path, rank: int, step: int) -> int:
    """Wait until a rank has reached a step; return its pid."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        beat = read_heartbeat(run, rank)
        if beat is not None and beat.step >= step:
            return beat.pid
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} never reached step {step}")


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """Five specs in one command, one import of torch: (folder, exit status, output)."""
    folder = tmp_path_factory.mktemp("forked")
    specs = [
        write_spec(folder, "user-fsdp2", "fsdp2"),
        write_spec(folder, "user-ddp"),
        write_spec(folder, "raise", kwargs=f"{{fault: raise, rank: 1, call: 5, token: {SECRET}}}"),
        write_spec(folder, "set-up", kwargs="{nonsense: 1}"),
        write_spec(folder, "hang", kwargs="{fault: hang, rank: 0, call: 5}"),
    ]
    process = start(*specs, "-o", folder / "runs", "--phase-timeout", "15")
    output, _ = process.communicate(timeout=200)
    return folder / "runs", process.returncode, output


@pytest.mark.parametrize(("name", "shards"), [("user-fsdp2", 2), ("user-ddp", 1)])
def test_users_own_model(forked: tuple[Path, int, str], name: str, shards: int) -> None:
    """A model named by import path is profiled, and its parameters are counted to the byte."""
    run = load_run(forked[0] / name)
    assert run.manifest.status == "completed"
    assert run.manifest.sizes is not None
    for series in run.ranks:
        assert [s.kind for s in series.steps] == ["observed"] * 3 + ["warmup"] * 2 + ["timed"] * 3
        assert all(s.loss_finite for s in series.steps)
        assert all(s.step_time_s and s.step_time_s > 0 for s in series.steps)
        assert series.anatomy is not None
        held = series.anatomy.phases[Phase.FORWARD].categories[Category.PARAMETERS]
        assert held == series.anatomy.expected_bytes["parameters"]
    total = sum(s.anatomy.expected_bytes["parameters"] for s in run.ranks if s.anatomy)
    assert total == run.manifest.sizes.parameter_bytes * (2 // shards)


def test_exception_in_one_rank(forked: tuple[Path, int, str]) -> None:
    """An exception in rank 1 is the run's failure, with step, phase and frames, exit status 1."""
    folder, status, output = forked
    run = load_run(folder / "raise")
    failure = run.manifest.failure
    assert (status, run.manifest.status) == (1, "failed")
    assert failure is not None
    assert (failure.kind, failure.rank, failure.step, failure.phase) == (
        "exception", 1, 4, Phase.FORWARD,
    )  # fmt: skip
    assert "the data loader returned <nothing>" in failure.message
    assert any("user_models.py" in frame for frame in failure.frames)
    assert failure.victims == (0,)
    assert "the data loader returned <nothing>" in output
    assert len(run.ranks[0].steps) >= 4
    assert_all_gone(rank_pids(folder / "raise"))


def test_secrets_are_not_written(forked: tuple[Path, int, str]) -> None:
    """A token among the factory's arguments, printed by the model, is in no file of the run."""
    folder, _, output = forked
    for path in (folder / "raise").iterdir():
        assert SECRET not in path.read_text(errors="replace"), path
    assert "loaded with" in (folder / "raise" / "launch.log").read_text()
    assert SECRET not in output


def test_set_up_that_fails_has_its_environment(forked: tuple[Path, int, str]) -> None:
    """A model that cannot be built still leaves device and environment in the run."""
    manifest = load_run(forked[0] / "set-up").manifest
    assert manifest.failure is not None
    assert (manifest.failure.kind, manifest.failure.step) == ("exception", -1)
    assert "nonsense" in manifest.failure.message
    assert manifest.device_name == manifest.environment["device_name"]
    assert manifest.environment["torch"]
    assert manifest.sizes is None


def test_hang_in_one_rank(forked: tuple[Path, int, str]) -> None:
    """A rank that sleeps in forward is named, with its stack, though the other waits as long."""
    folder, _, _ = forked
    failure = load_run(folder / "hang").manifest.failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.step, failure.phase) == (
        "hang", 0, 4, Phase.FORWARD,
    )  # fmt: skip
    assert "user_models.py" in failure.frames[0]
    assert_all_gone(rank_pids(folder / "hang"))


def test_kill_in_mid_step(tmp_path: Path) -> None:
    """Kill -9 of one rank under torchrun: no orphans, the record readable, the report says so."""
    spec = write_spec(tmp_path, "kill", kwargs="{fault: slow}", timed=2000)
    run = tmp_path / "run"
    process = start(spec, "-o", run)
    pid = wait_for_step(run, rank=1, step=7)
    os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=90)
    recorded = load_run(run)
    failure = recorded.manifest.failure
    assert process.returncode == 1
    assert failure is not None
    assert (failure.kind, failure.rank, failure.signal) == ("signal", 1, signal.SIGKILL)
    assert failure.step is not None
    assert failure.step >= 7
    assert failure.phase in {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.DATA}
    assert failure.victims == (0,)
    steps = [s for s in recorded.ranks[1].steps if s.step_time_s is not None]
    assert failure.step - 2 <= len(steps) <= failure.step
    assert re.search(r"rank 1, step \d+, (forward|backward|optimizer|data)", output)
    assert_all_gone(rank_pids(run))


def test_interrupt(tmp_path: Path) -> None:
    """Ctrl-C ends every rank, keeps what was recorded and exits with status 1."""
    spec = write_spec(tmp_path, "interrupt", kwargs="{fault: slow}", timed=2000)
    run = tmp_path / "run"
    process = start(spec, "-o", run)
    wait_for_step(run, rank=0, step=4)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    recorded = load_run(run)
    assert process.returncode == 1
    assert recorded.manifest.status == "interrupted"
    assert "Traceback" not in output
    assert len(recorded.ranks[0].steps) >= 4
    assert_all_gone(rank_pids(run))


def test_two_hosts(tmp_path: Path) -> None:
    """The same command on two hosts (here: twice on one) makes one run of both hosts' ranks."""
    spec = write_spec(tmp_path, "hosts")
    run = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    rendezvous = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    hosts = [start(spec, "-o", run, *rendezvous) for _ in range(2)]
    outputs = [host.communicate(timeout=120)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    recorded = load_run(run)
    assert recorded.manifest.status == "completed"
    assert [series.finished for series in recorded.ranks] == [True, True]
    assert sorted(path.name for path in run.iterdir()) == [
        "rank-00000.jsonl",
        "rank-00001.jsonl",
        "run.json",
    ]
