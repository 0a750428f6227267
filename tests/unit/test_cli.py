"""Wrong input to the commands: one clear line, exit status 2, no traceback, nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_doctor import __version__
from fsdp_doctor.cli import main

DEMO = Path(__file__).parent.parent.parent / "fsdp_doctor" / "demo" / "fsdp2-reshard.yaml"


def one_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Run the command line, which must refuse; return its one line."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.strip().splitlines()
    assert "Traceback" not in err
    assert lines[-1].lower().startswith("error: ")
    return lines[-1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints name and version."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fsdp-doctor, version {__version__}\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("", "empty"),
        ("workload: [", "not valid yaml"),
        ("world_size: 0\nconfig: {strategy: ddp}\n", "world_size"),
        ("config: {strategy: ddp}\nworl_size: 2\n", "world_size"),
        (
            "world_size: 3\nconfig: {strategy: fsdp2, fsdp2: {mesh: {replicate: 2, shard: 2}}}\n",
            "mesh",
        ),
    ],
    ids=["missing", "empty", "broken", "world-size-0", "unknown-key", "hsdp-on-3"],
)
@pytest.mark.parametrize("command", ["profile", "diff", "compare"])
def test_bad_specs(
    command: str,
    content: str | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A spec that cannot be used is named with its file and the reason, by every command."""
    spec = tmp_path / "spec.yaml"
    if content is not None:
        spec.write_text(content)
    arguments = {
        "profile": ["profile", str(spec), "-o", str(tmp_path / "run")],
        "diff": ["diff", str(DEMO), str(spec)],
        "compare": ["compare", str(DEMO), str(spec), "--runs", str(tmp_path / "runs")],
    }[command]
    line = one_error(capsys, arguments)
    assert "spec.yaml" in line
    assert said in line.lower()
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "runs").exists()


def test_directory_as_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory where a spec belongs is refused."""
    line = one_error(capsys, ["profile", str(tmp_path), "-o", str(tmp_path / "run")])
    assert "directory" in line


def test_more_ranks_than_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asking for CUDA with fewer GPUs than ranks is refused before anything is written."""
    run = tmp_path / "run"
    line = one_error(
        capsys,
        ["profile", str(DEMO), "-o", str(run), "--device", "cuda", "--set", "world_size=999"],
    )
    assert "999 GPUs" in line
    assert not run.exists()


def test_unwritable_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output that cannot be a directory is said before training starts."""
    (tmp_path / "file").write_text("in the way")
    line = one_error(capsys, ["profile", str(DEMO), "-o", str(tmp_path / "file" / "run")])
    assert "cannot write here" in line


def test_existing_run_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that already holds a run is not overwritten without --force."""
    (tmp_path / "run.json").write_text("{}")
    line = one_error(capsys, ["profile", str(DEMO), "-o", str(tmp_path)])
    assert "--force" in line
    assert (tmp_path / "run.json").read_text() == "{}"


def test_rank_outside_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--rank must be one of --one-rank-of."""
    arguments = ["profile", str(DEMO), "-o", str(tmp_path / "r"), "--one-rank-of", "4"]
    assert "0..3" in one_error(capsys, [*arguments, "--rank", "4"])


@pytest.mark.parametrize("command", ["report", "compare"])
def test_not_a_run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory without a run is refused with what to do."""
    arguments = [command, str(tmp_path)] + ([str(tmp_path)] if command == "compare" else [])
    assert "not a run directory" in one_error(capsys, arguments)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not a valid run manifest"),
        ("[1, 2]", "schema"),
        ('{"schema": 99}', "upgrade fsdp-doctor"),
        ('{"schema": 1, "name": 3}', "name"),
    ],
)
def test_broken_run(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken run.json is named with what is wrong in it."""
    (tmp_path / "run.json").write_text(content)
    line = one_error(capsys, ["report", str(tmp_path)])
    assert "run.json" in line
    assert said in line


def test_report_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare refuses an existing report before it starts to train."""
    report = tmp_path / "report.html"
    report.write_text("mine")
    line = one_error(capsys, ["compare", str(DEMO), str(DEMO), "-o", str(report)])
    assert "--force" in line
    assert report.read_text() == "mine"
