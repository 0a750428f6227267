"""Every statement with an evidence level says what it rests on, and all of that is listed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_jobs import SHARED, megatron_log, write
from test_what_if import compared as simulated
from test_what_if import spec_of

from fsdp_doctor.attribution.compare import compare_runs, comparison_to_payload
from fsdp_doctor.cli.compare import _compare
from fsdp_doctor.cli.sides import gather_sides
from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.report import render_comparison
from fsdp_doctor.runs import load_launches

RECORDED = Path(__file__).parents[2] / "profiles" / "h200" / "world-2"
PAIRS = [
    ("fsdp2-reshard", "fsdp2-no-reshard"),
    ("ddp", "fsdp2-reshard"),
    ("factorial-reshard-save-batch1", "factorial-keep-checkpoint-batch2"),
    ("fsdp2-checkpoint-full", "../oom/fsdp2-reshard"),
]


def traced(comparison: Comparison) -> set[str]:
    """Assert that all statements can be traced, and return the kinds of things they rest on."""
    payload = comparison_to_payload(comparison)
    launches = {one["label"][0] for one in payload["basis"] if one["used"]}
    points = {point["id"] for point in (payload["what_if"] or {}).get("points", ())}
    sources = {e["source"] for c in payload["changed"] for e in c["effects"]}
    kinds = set()
    told = [*payload["attribution"], *payload["findings"]]
    for statement in (one for one in told if one["level"] is not None):
        assert statement["rests_on"], statement
        for name in statement["rests_on"]:
            if name in ("A", "B"):
                assert name in launches
                kinds.add("run")
            elif re.fullmatch(r"S\d+", name):
                assert name in points
                kinds.add("simulation")
            else:
                assert name in sources
                kinds.add("source")
        assert statement["evidence"], statement
    return kinds


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1].rpartition("/")[2])
def test_of_recorded_runs(pair):
    """Levels 0 to 2: runs, and sources of formulas."""
    a, b = (load_launches(RECORDED / name) for name in pair)
    assert "run" in traced(compare_runs(a, b))


def test_of_simulated_points():
    """Points of the simulation are listed with the fields that they flip."""
    comparison, _ = simulated(spec_of("b", workload__micro_batch=2))
    assert {"run", "simulation"} <= traced(comparison)
    text = render_comparison(comparison, [], [], "markdown")
    assert "What the attribution rests on" in text
    for finding in comparison.findings:
        for name in finding.rests_on:
            assert name in text


def log_comparison(a: str, b: str) -> Comparison:
    """Compare two logs as the command does."""
    sides = gather_sides(Path(a), Path(b), None, 1, Path("runs"))
    return _compare(*sides, simulate=False)


def test_of_logs(tmp_path):
    """The lines of every kind are counted, with the first and last of them."""
    a = write(tmp_path / "a.log", megatron_log(times=[0.5] * 20))
    text = megatron_log(times=[0.6] * 20, peak_mib=15_000.0, micro_batch_size=1)
    b = write(tmp_path / "b.log", text)
    comparison = log_comparison(a, b)
    assert traced(comparison) >= {"run"}
    basis = comparison.basis[1]
    assert basis.log_lines == {"megatron iteration": 21, "megatron memory": 4}
    places = dict(reversed(place.split(" ", 1)) for place in basis.log_places)
    assert places.keys() == basis.log_lines.keys()
    lines = text.splitlines()
    for kind, words in (("megatron iteration", "elapsed time"), ("megatron memory", "(MB)")):
        name, _, span = places[kind].partition(":")
        told = [number for number, line in enumerate(lines, 1) if words in line]
        assert (name, span) == ("b.log", f"{told[0]}-{told[-1]}")


def test_of_real_logs():
    """Two public logs. Needs ../shared."""
    logs = [str(SHARED / f"bigscience_n16_ds_{side}.log") for side in ("off", "on")]
    if not all(Path(path).is_file() for path in logs):
        pytest.skip(f"no logs of real jobs in {SHARED}")
    comparison = log_comparison(*logs)
    assert "run" in traced(comparison)
    assert {f.level for f in comparison.findings} <= {0, 1, None}
