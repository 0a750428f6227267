"""The script that records real failures: its cases, arguments and trimming (no GPU needed)."""

from __future__ import annotations

import gzip
import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType

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
            assert spec_from_mapping(case.spec(tiny=tiny), case.name).name == case.name


def test_arguments(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """``--list`` names the cases; one that does not exist is refused with status 2."""
    assert script.main(["--list"]) == 0
    assert capsys.readouterr().out.count("\n") == len(script.CASES)
    assert script.main(["--dry-run", "ddp-leak"]) == 0
    assert '"name": "ddp-leak"' in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        script.main(["no-such-case"])
    assert ended.value.code == 2


def test_limits_lie_between_the_phases(script: ModuleType) -> None:
    """The first limit is above what the phase before reserves and below the failing phase's."""
    case = script.case_named("fsdp2-backward")
    tried = script.limits({"forward": 10 << 30, "backward": 12 << 30}, case)
    assert tried[0] == 11 << 30
    assert len(set(tried)) == len(tried) <= script.TRIES


def test_trimming_keeps_the_failure(script: ModuleType, tmp_path: Path) -> None:
    """A trimmed snapshot is small enough, and its refused request is told as before."""
    job = maker.training(40, oom=True)
    snapshot = job.snapshot()
    before = analyse_snapshot(maker.write(snapshot, tmp_path / "whole.pickle"))
    data = script.trimmed(pickle.loads(pickle.dumps(snapshot)), most=4_000)
    assert len(data) <= 4_000 < len(gzip.compress(pickle.dumps(snapshot, protocol=4), 9))
    (tmp_path / "s.pickle.gz").write_bytes(data)
    after = analyse_snapshot(tmp_path / "s.pickle.gz")
    assert after.events < before.events
    assert after.oom == before.oom
    assert after.focus.allocated_bytes == before.focus.allocated_bytes
