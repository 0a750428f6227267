"""``oom`` on our own run directories: the causes of a log, and the config is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_doctor.cli import main
from fsdp_doctor.postmortem import examine

RUN = Path(__file__).parents[2] / "profiles" / "h200" / "oom" / "fsdp2-reshard"


def test_recorded_failure_is_diagnosed() -> None:
    """The run that ran out of memory on an H200: numbers, phase, step, what filled it, flags."""
    result = examine([RUN])
    failure = result.triage.primary
    assert failure is not None
    assert (failure.rank, failure.phase, failure.iteration) == (0, "backward", 0)
    assert failure.requested_bytes == 500 << 20
    assert failure.limit_bytes is not None
    first = result.findings[0]
    assert first.cause == "activations"
    assert "batch.micro=2" in first.flags
    assert first.advice[0].saves_bytes == 5448957952
    assert any("activations hold 5.07 GiB of 7.83 GiB" in e.text for e in first.evidence)


def test_run_without_failure(tmp_path: Path) -> None:
    """A run that completed has no failure to explain, but its history is read."""
    completed = next(path for path in sorted((RUN.parents[1] / "world-2").iterdir()))
    result = examine([completed])
    assert result.triage.primary is None
    assert not result.verdict["enough"]
    assert result.logs.history.lines > 0


def test_run_beside_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run directory and the log of its launcher make one answer."""
    log = tmp_path / "launcher.log"
    log.write_text("rank 1: exitcode: -15\n")
    assert main(["oom", str(RUN), str(log), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["failures"][answer["first_failure"]]["kind"] == "device_oom"
    assert answer["findings"][0]["cause"] == "activations"


def test_broken_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run.json that is none ends with status 2."""
    (tmp_path / "run.json").write_text("{")
    assert main(["oom", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "run.json" in error
    assert "Traceback" not in error
