"""``log``: runs over time, where a metric changed for good, and what changed with it."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import GIB, make_run, make_value
from golden_files import assert_golden

from fsdp_doctor.attribution.run_history import Entry, find_changes
from fsdp_doctor.cli import main
from fsdp_doctor.model.run import Failure
from fsdp_doctor.runs import RankWriter, write_manifest


def created(day: int) -> str:
    """Return a moment of a day of January."""
    return f"2026-01-{day:02d}T10:00:00+00:00"


def entry(day: int, *, name: str = "gpt", times: tuple[float, ...] = (), **values: float) -> Entry:
    """Return a run of the history with these numbers."""
    run = make_run(name, created=created(day), ranks=[])
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "resident_bytes")
    numbers = dict.fromkeys((*names, "outside_pytorch_bytes", "allocation_retries", "tokens_per_s"))
    return Entry(
        directory=Path(f"{name}-{day}"),
        launches=(run,),
        values={**numbers, "step_time_s": float(np.mean(times)) if times else None, **values},
        log_times=tuple(np.log(times)),
    )


def changed(entries: list[Entry]) -> list[tuple[str, str, bool]]:
    """Return metric, the run from which on it is new, and whether that is confirmed."""
    return [(c.metric, c.at.directory.name, c.confirmed) for c in find_changes(entries)]


def peaks(*gib: float) -> list[Entry]:
    """Return runs with these peaks."""
    return [entry(i, peak_allocated_bytes=int(g * GIB)) for i, g in enumerate(gib, 1)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((10, 10, 12, 12), [("gpt-3", True)]),
        ((10, 10, 12, 10, 10), []),
        ((10, 10, 10), []),
        ((10, 10.0001, 10), []),
        ((10, 12, 14, 14), [("gpt-3", True)]),
        ((10, 10, 12), [("gpt-3", False)]),
        ((10, 10, 12, 12, 9, 9), [("gpt-3", True), ("gpt-5", True)]),
    ],
)
def test_bytes_change_for_good_when_the_next_run_keeps_them(values, expected):
    """A single run that falls back is an exception; the newest run waits for the next."""
    found = [(at, sure) for _, at, sure in changed(peaks(*values))]
    assert found == expected


def noisy(seed: int, *levels: float) -> list[Entry]:
    """Return runs of one launch each, whose step times vary by 1 %."""
    rng = np.random.default_rng(seed)
    return [
        entry(i, times=(float(level * np.exp(rng.normal(0, 0.01))),))
        for i, level in enumerate(levels, 1)
    ]


def test_a_slower_step_is_found_where_it_began():
    """8 % more from the seventh run on."""
    for seed in range(10):
        assert changed(noisy(seed, *[0.5] * 6, *[0.54] * 6)) == [("step_time_s", "gpt-7", True)]


def test_noise_is_no_change():
    """Of 200 series of 12 equal runs at most 5 % give an alarm; single slow runs give none."""
    alarms = sum(bool(changed(noisy(seed, *[0.5] * 12))) for seed in range(200))
    assert alarms <= 10
    assert changed(noisy(0, 0.5, 0.5, 0.5, 0.5, 0.9, 0.5, 0.5, 0.5, 0.5)) == []


def test_few_launches_say_nothing_about_time():
    """Two runs a side prove nothing, however slow; several launches of a run count."""
    assert changed(noisy(0, 0.5, 0.5, 0.9, 0.9)) == []
    runs = [entry(1, times=(0.5, 0.501, 0.499)), entry(2, times=(0.9, 0.901, 0.902))]
    assert changed(runs) == [("step_time_s", "gpt-2", True)]


def test_names_are_series_of_their_own_and_failures_are_passed_over():
    """A larger model of another name is no regression, nor is a run that died."""
    a, b = peaks(10, 10), [entry(3, name="large", peak_allocated_bytes=20 * GIB)]
    dead = entry(4, peak_allocated_bytes=3 * GIB)
    failure = Failure(kind="device_oom", message="x")
    manifest = replace(dead.launches[0].manifest, status="failed", failure=failure)
    dead = replace(dead, launches=(replace(dead.launches[0], manifest=manifest),))
    assert changed([*a, *b, dead, *[replace(e, directory=Path("later")) for e in a]]) == []


def write_run(
    directory: Path, day: int, peak: int, *, reshard: bool, torch: str, step_s: float
) -> None:
    """Write a run of one rank with four timed steps."""
    directory.mkdir(parents=True)
    config = {
        "strategy": make_value("fsdp2"),
        "sharding.impl": make_value("fsdp2"),
        "sharding.strategy": make_value("optim_grads_params"),
        "sharding.reshard_after_forward": make_value(reshard),
    }
    run = make_run("gpt", world_size=1, created=created(day), environment={"torch": torch})
    write_manifest(directory, replace(run.manifest, effective_config=config))
    writer = RankWriter(directory, 0)
    for step in range(4):
        counters = {"allocated_bytes": peak, "reserved_bytes": peak + GIB}
        writer.write("phase", {"step": step, "phase": "forward", "end": counters, "peak": counters})
        writer.write("step", {"step": step, "kind": "timed", "allocation_retries": 0})
        writer.write("times", {"step": step, "step_time_s": step_s, "phases": []})
    writer.write("end", {})
    writer.close()


@pytest.fixture(name="tree")
def tree_fixture(tmp_path: Path) -> Path:
    """Return a tree of five runs, the third of two launches; the fourth needs more."""
    old = {"reshard": True, "torch": "2.11.0"}
    for day, folder, peak, how in (
        (1, "a", 10, old),
        (2, "deep/b", 10, old),
        (3, "c/launch-000", 10, old),
        (3, "c/launch-001", 10, old),
        (4, "d", 12, {"reshard": False, "torch": "2.12.0"}),
        (5, "e", 12, {"reshard": False, "torch": "2.12.0"}),
    ):
        write_run(tmp_path / "tree" / folder, day, peak * GIB, step_s=0.5 + day / 1000, **how)
    (tmp_path / "tree" / "notes.txt").write_text("no run")
    return tmp_path / "tree"


def test_the_page_fits_a_terminal(tree, capsys):
    """Changes with their fields and versions, then the runs, at 80 columns."""
    assert main(["log", str(tree)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert_golden("log_tree.txt", text)


def test_json_and_csv_tell_the_same(tree, capsys, tmp_path):
    """Runs oldest first; each change with its fields and versions."""
    assert main(["log", str(tree), "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert (payload["schema"], payload["command"]) == (1, "log")
    assert [Path(run["directory"]).name for run in payload["runs"]] == ["a", "b", "c", "d", "e"]
    assert payload["runs"][2]["launches"] == 2
    metrics = {change["metric"] for change in payload["changes"]}
    assert metrics == {"peak_allocated_bytes", "peak_reserved_bytes", "resident_bytes"}
    for change in payload["changes"]:
        assert Path(change["at"]).name == "d"
        assert [f["key"] for f in change["fields"]] == ["sharding.reshard_after_forward"]
        assert change["environment"] == {"torch": "2.11.0 -> 2.12.0"}
    output = tmp_path / "runs.csv"
    assert main(["log", str(tree), "-o", str(output)]) == 0
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    sizes = [int(row["peak_allocated_bytes"]) // GIB for row in rows]
    assert sizes == [10, 10, 10, 12, 12]
    assert rows[3]["changed"].split() == sorted(metrics)
    assert main(["log", str(tree), "--format", "html"]) == 0
    assert "peak allocated" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["empty", "gone", "file"])
def test_a_tree_without_runs_is_one_line(name, tmp_path, capsys):
    """Status 2 with the place."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    assert main(["log", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / name) in line
