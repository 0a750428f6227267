"""The script that records real failures: its cases, arguments and trimming (no GPU needed)."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import snapshot_maker as maker

from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.memory.snapshot_analysis import analyse_snapshot
from fsdp_doctor.postmortem.causes import CAUSES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "record_ooms.py"


@pytest.fixture(name="script", scope="module")
def script_fixture() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("record_ooms", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_cases_are_jobs_with_known_causes(script: ModuleType) -> None:
    """Every case is a valid spec, tiny or not, and its cause is in the vocabulary."""
    names = [case.name for case in script.CASES]
    assert len(set(names)) == len(names) >= 12
    for case in script.CASES:
        assert case.cause in CAUSES
        for tiny in (False, True):
            assert spec_from_mapping(case.spec(tiny=tiny), case.name).name == "job"


def test_arguments(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """``--list`` names the cases; one that does not exist is refused with status 2."""
    assert script.main(["--list"]) == 0
    assert capsys.readouterr().out.count("\n") == len(script.CASES)
    assert script.main(["--dry-run", "ddp-leak"]) == 0
    assert '"strategy": "ddp"' in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        script.main(["no-such-case"])
    assert ended.value.code == 2


def phase(step: int, name: str, allocated: int, reserved: int) -> dict[str, object]:
    """What a run without a limit tells of one phase."""
    return {"step": step, "phase": name, "allocated": allocated, "reserved": reserved}


PHASES = [
    phase(0, "wrap", 10, 12),
    phase(0, "forward", 30, 34),
    phase(0, "backward", 40, 44),
    phase(0, "optimizer", 35, 44),
    phase(1, "forward", 50, 70),
    phase(1, "backward", 55, 70),
]


def test_limits_lie_between_the_phases(script: ModuleType) -> None:
    """A limit is below what the phase meant allocates and above what was reserved before it, or
    above what was allocated where that leaves no room; the step with the most room is taken.
    """
    forward = script.case_named("ddp-forward")
    found = script.window(PHASES, forward)
    assert (found.index, found.low, found.high) == (1, 12, 30)
    assert script.limit_in(found, 0.5) == 21
    found = script.window(PHASES, script.case_named("fsdp2-backward-expandable"))
    assert (found.index, found.low, found.high) == (2, 34, 40)
    assert script.window(PHASES, script.case_named("ddp-optimizer-state")) is None
    first = script.window(PHASES, dataclasses.replace(forward, step=0))
    later = script.window(PHASES, dataclasses.replace(forward, step=1))
    assert (first.index, later.index, later.low, later.high) == (1, 4, 44, 50)
    early = script.narrowed(found, 35, {"phases_done": 1})
    late = script.narrowed(found, 35, None)
    assert ((early.low, early.high), (late.low, late.high)) == ((35, 40), (34, 35))


@pytest.fixture(name="jobs")
def jobs_fixture(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[object]]:
    """In place of jobs on a GPU: what ``PHASES`` say, with the limits that were given."""
    given: dict[str, list[object]] = {}

    def run(
        case: Any, folder: Path, limit: int | None, _clock: object, _options: object
    ) -> tuple[int, str]:
        given.setdefault(case.name, []).append(limit)
        if case.name == "fsdp1-forward":
            raise OSError("no such device")
        (folder / "peaks.json").write_text(json.dumps(PHASES))
        full = [n for n, p in enumerate(PHASES) if limit is not None and p["allocated"] > limit]  # type: ignore[operator]
        if not full:
            return 0, "step 0\n"
        done = PHASES[full[0]]
        truth = {"phase": done["phase"], "step": done["step"], "phases_done": full[0]}
        (folder / "truth.json").write_text(json.dumps({**truth, "error": "OutOfMemoryError: x"}))
        return 1, f'step 0\n[rank0]:   File "{script.ROOT}/benchmarks/ooms/job.py", line 3, in f\n'

    monkeypatch.setattr(script, "run_job", run)
    return given


def test_one_case_does_not_stop_the_others(
    script: ModuleType,
    jobs: dict[str, list[object]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cases are recorded side by side; one that breaks is told of; kept files name no machine."""
    names = ["fsdp1-forward", "ddp-forward", "fsdp2-backward-expandable"]
    arguments = [*names, "--jobs", "3", "--out", str(tmp_path), "--no-diagnosis"]
    assert script.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "2 of 3 recorded" in printed
    assert "no such device" in printed
    assert jobs["ddp-forward"] == [None, 21]
    assert jobs["fsdp2-backward-expandable"] == [None, 37]
    kept = tmp_path / "ddp-forward"
    assert json.loads((kept / "case.json").read_text())["phase"] == "forward"
    assert 'File "/workspace/benchmarks/ooms/job.py"' in (kept / "log.txt").read_text()
    spec = spec_from_mapping(json.loads((kept / "config.json").read_text()), "config.json")
    assert spec.name == "job"


def test_paths_are_cleaned(script: ModuleType) -> None:
    """Paths of this machine become paths below ``/workspace``; addresses stay."""
    keep = sys.modules[script.keep.__module__]
    text = (
        'File "/opt/v/lib/python3.12/site-packages/torch/optim/adamw.py", line 1\n'
        'File "/usr/lib/python3.12/runpy.py", line 2\n/tmp/tmpab12/printed.txt '
        "/opt/own/megatron/core/optimizer/optimizer.py /pytorch/torch/csrc/Module.cpp:3 "
        "https://docs.pytorch.org/docs/stable/notes/cuda.html ../torch/csrc/x.cpp 3/4\n"
    )
    assert keep.clean_log(text) == (
        'File "/workspace/site-packages/torch/optim/adamw.py", line 1\n'
        'File "/workspace/python3.12/runpy.py", line 2\n/workspace/printed.txt '
        "/workspace/site-packages/megatron/core/optimizer/optimizer.py "
        "/pytorch/torch/csrc/Module.cpp:3 "
        "https://docs.pytorch.org/docs/stable/notes/cuda.html ../torch/csrc/x.cpp 3/4\n"
    )


def test_trimming_keeps_the_failure(script: ModuleType, tmp_path: Path) -> None:
    """A trimmed snapshot is small enough, and its refused request is told as before."""
    job = maker.training(40, oom=True)
    snapshot = job.snapshot()
    before = analyse_snapshot(maker.write(snapshot, tmp_path / "whole.pickle"))
    keep = sys.modules[script.keep.__module__]
    data = keep.trimmed(pickle.loads(pickle.dumps(snapshot)), most=4_000)
    assert len(data) <= 4_000 < len(gzip.compress(pickle.dumps(snapshot, protocol=4), 9))
    (tmp_path / "s.pickle.gz").write_bytes(data)
    after = analyse_snapshot(tmp_path / "s.pickle.gz")
    assert after.events < before.events
    assert after.oom == before.oom
    assert after.focus.allocated_bytes == before.focus.allocated_bytes
