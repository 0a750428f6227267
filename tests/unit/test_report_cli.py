"""The ``report`` command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import report_samples as samples

from fsdp_doctor.cli import main
from fsdp_doctor.runs import RankWriter, write_manifest


@pytest.fixture(name="run_dir")
def run_dir_fixture(tmp_path):
    """A run directory with one observed step, that failed."""
    directory = tmp_path / "run"
    directory.mkdir()
    run = samples.failed_run()
    write_manifest(directory, run.manifest)
    for rank in (0, 1):
        writer = RankWriter(directory, rank)
        writer.write("start", {"local_rank": rank, "host": "node", "pid": 7, "device": "cuda"})
        counters = {"allocated_bytes": 5, "reserved_bytes": 9}
        writer.write("phase", {"step": 0, "phase": "forward", "end": counters, "peak": counters})
        writer.write("step", {"step": 0, "kind": "observed"})
        writer.close()
    return directory


def test_failed_run_is_reported_with_status_zero(run_dir, capsys):
    """A failed run is an answer, not an error."""
    assert main(["report", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "device oom: rank 1, step 1, backward" in out
    assert "\x1b[" not in out


@pytest.mark.parametrize("name", ["r.html", "r.md", "r.json", "r.csv", "r.txt"])
def test_output_file_is_written_once(run_dir, tmp_path, capsys, name):
    """The extension chooses the format; a second time needs --force."""
    target = tmp_path / name
    assert main(["report", str(run_dir), "-o", str(target)]) == 0
    assert capsys.readouterr().out == f"Wrote {target}\n"
    written = target.read_text()
    target.write_text("mine")
    assert main(["report", str(run_dir), "-o", str(target)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main(["report", str(run_dir), "-o", str(target), "--force"]) == 0
    assert target.read_text() == written
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_format_overrides_the_extension(run_dir, tmp_path):
    """--format writes that format, whatever the file is called."""
    target = tmp_path / "report.out"
    assert main(["report", str(run_dir), "-o", str(target), "--format", "json"]) == 0
    assert json.loads(target.read_text())["command"] == "report"


@pytest.mark.parametrize("arguments", [["--json"], ["--format", "json"]])
def test_json_is_printed(run_dir, capsys, arguments):
    """--json and --format json print the same envelope."""
    assert main(["report", str(run_dir), *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["runs"][0]["directory"] == str(run_dir)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "no such file or directory"),
        (["."], "not a run directory"),
        (["RUN", "-o", "report.pdf"], "no report format for the extension '.pdf'"),
        (["RUN", "-o", "no/such/folder/report.html"], "No such file or directory"),
        ([], "Missing argument"),
    ],
)
def test_unusable_input_ends_with_status_two(run_dir, monkeypatch, capsys, arguments, message):
    """One line says what is wrong; nothing is written."""
    empty = run_dir.parent / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    assert main(["report", *[str(run_dir) if a == "RUN" else a for a in arguments]]) == 2
    assert message in capsys.readouterr().err
    assert list(empty.iterdir()) == []


def test_output_that_cannot_encode_lines_gets_ascii(run_dir):
    """A terminal of an old encoding shows plain characters instead of a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_doctor", "report", str(run_dir)],
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin"},
        capture_output=True,
        check=True,
    )
    assert b"Memory per phase ----" in done.stdout


def test_terminal_report_loads_no_plotting_library(run_dir):
    """pandas, matplotlib, jinja2 and torch are loaded only where they are used."""
    code = (
        "import sys; from fsdp_doctor.cli import main; main(sys.argv[1:]); "
        "heavy = {'pandas', 'matplotlib', 'jinja2', 'torch', 'scipy', 'numpy'} & set(sys.modules); "
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(run_dir)], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
