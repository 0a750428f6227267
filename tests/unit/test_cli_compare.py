"""``compare`` and ``demo`` of specs: exit statuses, Ctrl-C, and what a second call replaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import make_run

from fsdp_doctor.cli import main
from fsdp_doctor.model.run import Failure, Run
from fsdp_doctor.runs import RankWriter, load_run, write_manifest

DEMO = Path(__file__).parent.parent.parent / "fsdp_doctor" / "demo"
A, B = str(DEMO / "fsdp2-reshard.yaml"), str(DEMO / "fsdp2-no-reshard.yaml")
OOM = Failure(kind="device_oom", message="out of memory", rank=0, step=0, phase="backward")
STOPPED = Failure(kind="interrupted", message="stopped by Ctrl-C or SIGTERM")


def write_run(directory: Path, failure: Failure | None = None, *, empty: bool = False) -> Run:
    """Write a run of one rank with one step to ``directory`` and read it back."""
    directory.mkdir(parents=True, exist_ok=True)
    manifest = make_run(directory.parent.name, world_size=1, failure=failure).manifest
    if failure is STOPPED:
        manifest = replace(manifest, status="interrupted")
    write_manifest(directory, manifest)
    if not empty:
        writer = RankWriter(directory, 0)
        counters = {"allocated_bytes": 1 << 30, "reserved_bytes": 1 << 30}
        writer.write("phase", {"step": 0, "phase": "forward", "end": counters, "peak": counters})
        writer.write("step", {"step": 0, "kind": "observed"})
        writer.write("end", {})
        writer.close()
    return load_run(directory)


Trained = Callable[[Path], Run]


@pytest.fixture(name="train")
def train_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trained], None]:
    """Let a function stand for training; it gets each launch's directory, until one is stopped."""

    def use(trained: Trained) -> None:
        def profile_many(jobs: Sequence[tuple[Any, Path]], *_: Any) -> list[Run]:
            runs = []
            for _, directory in jobs:
                runs.append(trained(directory))
                if runs[-1].manifest.status == "interrupted":
                    break
            return runs

        monkeypatch.setattr("fsdp_doctor.profiler.launch.profile_many", profile_many)

    return use


def compare(tmp_path: Path, a: str, b: str, *more: str) -> int:
    """Run ``compare`` with its recordings under ``tmp_path``."""
    return main(["compare", a, b, "--runs", str(tmp_path / "runs"), "--launches", "2", *more])


def test_an_old_failed_run_is_an_answer(tmp_path: Path) -> None:
    """Comparing recorded runs succeeds, whatever became of them."""
    write_run(tmp_path / "good")
    write_run(tmp_path / "bad", OOM)
    assert main(["compare", str(tmp_path / "good"), str(tmp_path / "bad")]) == 0


def test_an_old_failed_run_beside_a_new_one_is_an_answer(
    tmp_path: Path, train: Callable[[Trained], None]
) -> None:
    """Only what was trained now counts: a spec that completed against a run that had failed."""
    train(write_run)
    write_run(tmp_path / "bad", OOM)
    assert compare(tmp_path, A, str(tmp_path / "bad")) == 0


@pytest.mark.parametrize("failing", ["a-", "b-"])
def test_a_spec_that_fails_now_is_status_1(
    failing: str, tmp_path: Path, train: Callable[[Trained], None]
) -> None:
    """On either side; the comparison is printed all the same."""
    train(lambda path: write_run(path, OOM if path.parent.name.startswith(failing) else None))
    assert compare(tmp_path, A, B) == 1


@pytest.mark.parametrize("empty", [True, False])
def test_ctrl_c_before_b_ran_says_interrupted(
    empty: bool,
    tmp_path: Path,
    train: Callable[[Trained], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is nothing to compare then, and that is not the input's fault."""
    train(lambda path: write_run(path, STOPPED, empty=empty))
    assert compare(tmp_path, A, B) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip().splitlines()[-1] == "interrupted"


def test_ctrl_c_after_both_ran_still_compares(
    tmp_path: Path, train: Callable[[Trained], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """What both sides completed is reported, with status 1."""
    second = "launch-001"
    train(lambda path: write_run(path, STOPPED if path.name == second else None))
    assert compare(tmp_path, A, B) == 1
    assert "Findings" in capsys.readouterr().out


def test_force_leaves_no_launch_of_a_longer_series(
    tmp_path: Path, train: Callable[[Trained], None]
) -> None:
    """Earlier launches of the specs are removed first; other files and specs stay."""
    train(write_run)
    other = tmp_path / "runs" / "a-other" / "launch-007"
    name = _folder_of(A)
    folder = tmp_path / "runs" / name
    for path in (folder / "launch-000", folder / "launch-004", other):
        write_run(path)
    (folder / "launch-005").mkdir()
    (folder / "notes.txt").write_text("mine")
    assert compare(tmp_path, A, B, "--force") == 0
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["launch-000", "launch-001", "launch-005", "notes.txt"]
    assert other.is_dir()


def _folder_of(spec: str) -> str:
    from fsdp_doctor.config.spec import load_written_spec

    return f"a-{load_written_spec(Path(spec)).spec.name}"


def test_without_force_earlier_launches_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names --force, before anything is trained or removed."""
    launch = tmp_path / "runs" / _folder_of(A) / "launch-000"
    write_run(launch)
    assert compare(tmp_path, A, B) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "already holds a run" in line
    assert "--force" in line
    assert load_run(launch).ranks[0].steps


def test_the_demo_can_be_run_again(tmp_path: Path, train: Callable[[Trained], None]) -> None:
    """A second demo replaces its own runs and report, a shorter one too."""
    train(write_run)
    demo = ["demo", "-o", str(tmp_path / "demo")]
    assert main([*demo, "--launches", "3"]) == 0
    report = tmp_path / "demo" / "report.html"
    report.write_text("old")
    assert main([*demo, "--launches", "1"]) == 0
    assert report.read_text(encoding="utf-8") != "old"
    launches = sorted(path.name for path in (tmp_path / "demo" / "runs").glob("*/launch-*"))
    assert launches == ["launch-000", "launch-000"]


def test_the_demo_keeps_a_report_that_is_not_its_own(
    tmp_path: Path, train: Callable[[Trained], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without the demo's runs is the user's: its report.html is not replaced."""
    train(write_run)
    (tmp_path / "report.html").write_text("mine")
    assert main(["demo", "-o", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_text() == "mine"
