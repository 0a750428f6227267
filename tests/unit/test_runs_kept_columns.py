"""Columns that a rank's writer keeps beside its lines: they save time and change no number."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from test_runs_columns import same_columns, write_rank

from fsdp_doctor.runs import reader, writer
from fsdp_doctor.runs.columns import StepColumns, columns_from, columns_of
from fsdp_doctor.runs.kept_columns import columns_path, keep_columns, kept_columns

COUNTERS = {"allocated_bytes": 3 << 30, "reserved_bytes": None}


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    """Return a rank's file with its columns beside it."""
    monkeypatch.setattr(writer, "LONG_BYTES", 1)
    monkeypatch.setattr(reader, "LONG_BYTES", 1)
    steps = [
        {
            "kind": "observed" if number == 0 else "timed",
            "phases": [
                {"phase": name, "microbatch": 0, "end": COUNTERS, "peak": COUNTERS}
                for name in ("forward", "backward")
            ],
            "retries": number // 4,
            "device": None,
            "time": 0.5 + number / 8,
            "begins": True,
            "ends": True,
            "known": number % 3,
        }
        for number in range(12)
    ]
    return write_rank(tmp_path, steps)


def loaded(path: Path) -> tuple[reader.RankSeries, list[str]]:
    """Read a rank as ``load_run`` does."""
    return reader._read_rank(path, 0)


def test_kept_columns_are_those_of_the_lines(path):
    """And the records between the steps come with them; nothing else is left in the folder."""
    records = reader.load_steps(path, 0)
    kept = kept_columns(path, lambda: records)
    assert kept is not None
    same_columns(kept.columns, columns_from(records))
    series, warnings = loaded(path)
    careful = reader._load_carefully(path, 0, [])
    assert warnings == []
    assert isinstance(series.steps, StepColumns)
    assert replace(series, steps=tuple(series.steps)) == careful
    assert sorted(p.name for p in path.parent.iterdir()) == [columns_path(path).name, path.name]


def test_the_lines_are_not_parsed_again(path, monkeypatch):
    """The columns stand for them."""
    monkeypatch.setattr(
        "fsdp_doctor.runs.fast_reader.read_columns", lambda *_: pytest.fail("parsed")
    )
    assert len(loaded(path)[0].steps) == 12


@pytest.mark.parametrize("change", ["digit", "shorter", "replaced"])
def test_columns_of_other_lines_are_left_aside(path, change):
    """One changed digit is enough."""
    text = path.read_bytes()
    if change == "digit":
        path.write_bytes(text.replace(b'"step":4,"step_time_s":1.0', b'"step":4,"step_time_s":7.0'))
    elif change == "shorter":
        path.write_bytes(text[: text.rindex(b'{"record":"begin"')])
    else:
        path.write_bytes(text + text)
    if change != "replaced":
        assert kept_columns(path, tuple) is None
    series, _ = loaded(path)
    same_columns(columns_of(series), columns_from(reader.load_steps(path, 0)))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data + b"\0",
        lambda data: b"\xff" + data,
        lambda data: data.replace(b'"schema":1', b'"schema":2'),
        lambda data: data.replace(b'"steps":12', b'"steps":-1'),
        lambda data: data.replace(b'"steps":12', b'"steps":11'),
        lambda data: data.replace(b'"covers":', b'"covers":1'),
        lambda data: data.replace(b'"phases":[', b'"phases":["x",'),
    ],
)
def test_damaged_columns_are_left_aside(path, damage):
    """The lines are read then, without a word."""
    data = columns_path(path).read_bytes()
    columns_path(path).write_bytes(damage(data))
    assert columns_path(path).read_bytes() != data
    assert kept_columns(path, tuple) is None
    series, warnings = loaded(path)
    assert (len(series.steps), warnings) == (12, [])


def test_lines_that_come_later_count(path):
    """The exit that the parent writes, a warning, a torn line; steps make the lines be read."""
    more = writer.RankWriter(path.parent, 0)
    more.write("exit", {"exit_code": 3, "signal": None})
    os.write(more._descriptor, b'{"record":"warn')
    os.close(more._descriptor)
    series, warnings = loaded(path)
    assert isinstance(series.steps, StepColumns)
    assert (series.exit_code, len(series.steps)) == (3, 12)
    lines = path.read_bytes().count(b"\n") + 1
    assert warnings == [f"rank-00000.jsonl:{lines}: line skipped (torn by a crash)"]
    with path.open("a") as stream:
        stream.write('\n{"record":"step","step":12,"kind":"timed"}\n')
    assert len(loaded(path)[0].steps) == 13


def test_short_and_unusual_files_have_no_columns(tmp_path, monkeypatch):
    """They are read line by line anyway; a folder without room for columns is no error."""
    path = write_rank(tmp_path, [])
    assert not columns_path(path).exists()
    with path.open("a") as stream:
        stream.write('{"record":"failure","kind":"exception","message":"x"}\n')
    keep_columns(path)
    assert not columns_path(path).exists()
    keep_columns(tmp_path / "gone.jsonl")
    path = write_rank(tmp_path, [], rank=1)
    columns_path(path).mkdir()
    keep_columns(path)
    assert sorted(p.name for p in tmp_path.iterdir() if "columns" in p.name) == [
        columns_path(path).name
    ]
