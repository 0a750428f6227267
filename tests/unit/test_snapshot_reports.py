"""``report`` and ``compare`` on snapshots: terminal, HTML, Markdown, JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import snapshot_maker as maker
from golden_files import assert_golden

from fsdp_doctor.cli import main
from fsdp_doctor.memory.snapshot_compare import compare_snapshots
from fsdp_doctor.postmortem.snapshot_differences import explain_comparison

MiB = maker.MiB
FIXTURES = Path(__file__).parent.parent / "fixtures" / "snapshots"


@pytest.fixture(name="folder")
def folder_fixture(tmp_path, monkeypatch):
    """A folder to work in, with two snapshots of a job before and after a change."""
    monkeypatch.chdir(tmp_path)
    maker.write(maker.training(3).snapshot(), tmp_path / "before.pickle")
    after = maker.training(3, activation=24 * MiB, leak=2 * MiB)
    maker.write(after.snapshot(), tmp_path / "after.pickle.gz")
    return tmp_path


@pytest.mark.parametrize("name", ["oom", "leak"])
def test_report_reads_as_expected(name, monkeypatch, capsys):
    """The terminal report of the packaged snapshots, 80 columns wide."""
    monkeypatch.chdir(FIXTURES)
    assert main(["report", f"{name}.pickle.gz"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert_golden(f"snapshot_{name}.txt", text)


def test_comparison_reads_as_expected(monkeypatch, capsys):
    """The terminal comparison of the packaged snapshots, 80 columns wide."""
    monkeypatch.chdir(FIXTURES)
    assert main(["compare", "leak.pickle.gz", "oom.pickle.gz"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert_golden("snapshot_compare.txt", text)


@pytest.mark.parametrize("command", [["report", "before.pickle"],
                                     ["compare", "before.pickle", "after.pickle.gz"]])  # fmt: skip
@pytest.mark.parametrize("target", ["r.html", "r.md", "r.json", "r.txt"])
def test_every_format_is_written(command, target, folder, capsys):
    """The extension chooses the format, and an existing file is kept."""
    assert main([*command, "-o", target]) == 0
    text = (folder / target).read_text()
    assert f"Wrote {target}" in capsys.readouterr().out
    if target == "r.html":
        assert text.count("<svg") >= 1
        assert "activations" in text
    if target == "r.json":
        assert json.loads(text)["command"] == command[0]
    assert main([*command, "-o", target]) == 2
    assert main([*command, "-o", target, "--force"]) == 0


def test_json_of_a_report(folder, capsys):
    """Every number is an integer, every unknown null, by the names of the model."""
    assert main(["report", "before.pickle", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["snapshots"][0]
    assert report["schema"] == 1
    assert found["peak"]["allocated_bytes"] == 46 * MiB + 512
    assert found["oom"] is None
    assert found["rank"] is None
    assert found["findings"] == report["findings"]
    assert set(report["findings"][0]) == {
        "cause", "claim", "confidence", "severity", "level", "evidence", "flags", "advice",
        "rests_on",
    }  # fmt: skip


def test_json_of_a_comparison(folder, capsys):
    """The contract's keys are there, with the stack that grew."""
    assert main(["compare", "before.pickle", "after.pickle.gz", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = {"a", "b", "metrics", "changed", "attribution", "unexplained", "findings"}
    assert keys <= set(found)
    peak = found["metrics"][0]
    assert peak["name"] == "peak_allocated_bytes"
    assert peak["b"] - peak["a"] == peak["delta"] > 0
    assert peak["verdict"] == "worse"
    assert found["stacks"][0]["what"] == "grew"
    assert found["aligned"] == "the peak of step 2"


def test_grown_stack_is_found(folder):
    """The same code with larger blocks is one stack that grew, not one new and one gone."""
    compared = compare_snapshots(folder / "before.pickle", folder / "after.pickle.gz")
    found = explain_comparison(compared)
    by_what = {change.what for change in found.stacks}
    assert by_what == {"grew", "new"}
    grown = found.stacks[0]
    assert (grown.a_bytes, grown.b_bytes, grown.a_count, grown.b_count) == (
        16 * MiB, 48 * MiB, 2, 2,
    )  # fmt: skip
    assert found.findings[0].cause == "activations"
    assert sum(change.delta_bytes for change in found.stacks) == (
        found.moment_b.allocated_bytes - found.moment_a.allocated_bytes
    )


def test_line_numbers_do_not_matter(folder):
    """Code that moved within its file is the same code."""
    maker.STACKS["moved"] = maker.STACKS["keep"].replace("metrics.py:7", "metrics.py:19")
    a, b = maker.Maker(), maker.Maker()
    a.alloc(8 * MiB, "keep")
    b.alloc(12 * MiB, "moved")
    found = compare_snapshots(
        maker.write(a.snapshot(), folder / "a.pickle"),
        maker.write(b.snapshot(), folder / "b.pickle"),
    )
    assert [(change.what, change.delta_bytes) for change in found.stacks] == [("grew", 4 * MiB)]


def test_same_snapshot_has_no_differences(folder, capsys):
    """A snapshot against itself: nothing grew."""
    assert main(["compare", "before.pickle", "before.pickle"]) == 0
    assert "Nothing got clearly larger or smaller." in capsys.readouterr().out


def test_ranks_are_compared_alike(folder, capsys):
    """Of two directories the same rank is compared; a report names all ranks."""
    for side, size in (("a", 8), ("b", 16)):
        (folder / side).mkdir()
        for rank in (0, 1):
            job = maker.training(2, activation=(size + rank) * MiB)
            maker.write(job.snapshot(), folder / side / f"rank{rank}.pickle")
    assert main(["compare", "a", "b"]) == 0
    assert "rank0.pickle (rank 0) -> rank0.pickle (rank 0)" in capsys.readouterr().out
    assert main(["report", "a"]) == 0
    assert "2 snapshots" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "before.pickle", "spec.yaml"], "not a memory snapshot, but the other one is"),
        (["report", "before.pickle", "-o", "r.csv"], "no csv of snapshots"),
        (["report", "empty.pickle"], "the snapshot is empty"),
        (["report", "none.pickle"], "no such file or directory"),
    ],
)
def test_unusable_input_is_one_line(arguments, message, folder, capsys):
    """What cannot be used ends with status 2 and one line."""
    (folder / "spec.yaml").write_text("a: 1\n")
    maker.write({"segments": [], "device_traces": [[]]}, folder / "empty.pickle")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_fixtures_are_what_the_maker_makes():
    """The packaged snapshots come from this repository's own generator."""
    from fsdp_doctor.memory.snapshot_analysis import analyse_snapshot

    for name, job in fixtures().items():
        made = maker.write(job.snapshot(), FIXTURES / f".{name}.check.pickle.gz")
        try:
            assert made.read_bytes() == (FIXTURES / f"{name}.pickle.gz").read_bytes()
            assert analyse_snapshot(made).events == len(job.trace)
        finally:
            made.unlink()


def fixtures() -> dict[str, maker.Maker]:
    """The packaged snapshots: ``python tests/unit/test_snapshot_reports.py`` writes them."""
    return {
        "leak": maker.training(6, leak=3 * MiB),
        "oom": maker.training(3, oom=True, activation=32 * MiB),
    }


if __name__ == "__main__":
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for fixture, made_job in fixtures().items():
        maker.write(made_job.snapshot(), FIXTURES / f"{fixture}.pickle.gz")
