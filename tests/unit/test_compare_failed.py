"""Comparisons with a side that failed."""

from dataclasses import replace
from pathlib import Path

from builders import (
    GIB,
    MIB,
    make_anatomy,
    make_change,
    make_diff,
    make_effect,
    make_rank,
    make_run,
    make_step,
)

from fsdp_doctor.attribution.compare import compare_runs, compare_with_diff
from fsdp_doctor.model.run import Failure
from fsdp_doctor.runs import load_run

RECORDED = Path(__file__).parent.parent.parent / "profiles" / "h200"
RECOMPUTE = make_change(
    "recompute.mode",
    "full",
    "none",
    make_effect("activations", "up"),
    step_time="down",
)
BATCH = make_change("batch.micro", 1, 2, make_effect("activations", "up"))
OPTIMIZER = make_change(
    "optimizer.foreach", 1, 2, make_effect("temporaries", "up", None, "optimizer")
)
OOM = Failure(
    kind="device_oom",
    message="out of memory",
    rank=0,
    step=0,
    phase="backward",
    requested_bytes=GIB // 2,
)


def failing_run(name="b", *, failure=OOM, anatomy=True):
    """Return a run whose first step failed in backward with 6 GiB of activations alive."""
    peaks = {"forward": {"parameters": GIB, "activations": 6 * GIB}}
    alive = {**peaks, "backward": {"parameters": GIB, "activations": 6 * GIB}}
    step = make_step(0, "warmup", peaks if anatomy else alive)
    series = make_rank(0, peaks=peaks, anatomy=False, observed=False)
    found = replace(make_anatomy(alive, {}), step=0) if anatomy else None
    series = replace(series, steps=(step,), anatomy=found, finished=False)
    return make_run(name, ranks=[series], failure=failure)


def compared(*changes, **options):
    """Compare a completed run with the failing one."""
    a = make_run("a", world_size=1)
    return compare_with_diff([a], [failing_run(**options)], make_diff(*changes))


def oom_rows(result):
    """Return the rows of the failing moment by category; they must sum to its difference."""
    (metric,) = [m for m in result.metrics if m.name == "out_of_memory_bytes"]
    rows = [row for row in result.attribution if row.metric == "out_of_memory_bytes"]
    assert sum(row.value for row in rows) == metric.delta
    assert (metric.verdict, metric.phase, metric.rank) == ("unclear", "backward", 0)
    return {row.category: row for row in rows}


def test_failed_run_is_compared_on_what_it_has():
    """A run that ran out of memory in its first step is compared with a warning and a finding."""
    failure = Failure(kind="device_oom", message="out of memory", rank=1, step=0, phase="backward")
    partial = [make_rank(0, peaks={"forward": {"activations": 9 * GIB}}, anatomy=False)]
    b = make_run("b", ranks=partial, failure=failure, world_size=2)
    result = compare_with_diff([make_run("a")], [b], make_diff())
    peaks = {(m.rank, m.phase): m for m in result.metrics if m.name == "peak_allocated_bytes"}
    assert peaks[0, None].b == 9 * GIB
    assert peaks[None, "backward"].b is None
    assert any("b failed (device_oom); compared on what it recorded" in w for w in result.warnings)
    assert result.findings[0].cause == "failed-run"
    assert result.findings[0].severity == "error"
    assert any("1 ranks are recorded only in A" in w for w in result.warnings)


def test_the_flag_that_made_b_run_out_of_memory_is_named():
    """The finding names field, category and bytes at the failing moment, and undoes the change."""
    result = compared(RECOMPUTE, OPTIMIZER)
    finding = next(f for f in result.findings if f.flags)
    assert finding.claim == (
        "b (B) ran out of memory in backward of step 0; recompute.mode full -> none may account "
        "for 4.00 GiB more in activations than A held there"
    )
    assert (finding.level, finding.severity, finding.flags) == (0, "error", ("recompute.mode",))
    assert finding.advice[0].change == "set recompute.mode back to full"
    assert finding.advice[0].saves_bytes == 4 * GIB
    assert "categories of A's step 1 and B's step 0" in finding.evidence[0].text
    rows = oom_rows(result)
    assert rows["activations"].value == 4 * GIB
    assert rows["request"].value == GIB // 2


def test_fields_that_act_together_are_all_offered():
    """Two fields on one category are not divided; undoing either is advice without bytes."""
    finding = next(f for f in compared(RECOMPUTE, BATCH).findings if f.flags)
    assert finding.flags == ("recompute.mode", "batch.micro")
    assert "may together account for 4.00 GiB more in activations" in finding.claim
    assert [a.saves_bytes for a in finding.advice] == [None, None]


def test_no_field_is_blamed_for_an_oom_that_none_explains():
    """A field of another phase is not named; what grew is still told."""
    (_, finding) = compared(OPTIMIZER).findings
    assert finding.cause == "unexplained"
    assert "no changed field is known to raise what it held there" in finding.claim


def test_an_oom_without_categories_is_compared_as_a_whole():
    """Without an anatomy the bytes of the phase go to the only field that raises memory there."""
    result = compared(RECOMPUTE, anatomy=False)
    rows = oom_rows(result)
    assert rows[None].keys == ("recompute.mode",)
    assert rows[None].value == 3 * GIB


def test_lower_bounds_are_never_better():
    """What B held before it failed is less than it needed: unclear, unless it is more already."""
    result = compared(RECOMPUTE)
    verdicts = {m.verdict for m in result.metrics if m.unit == "bytes" and m.phase is None}
    assert "better" not in verdicts
    first = next(m for m in result.metrics if m.name == "first_step_peak_allocated_bytes")
    assert first.verdict == "worse"
    gradients = next(
        m for m in result.metrics if (m.category, m.phase) == ("gradients", "backward")
    )
    assert gradients.verdict == "unclear"
    assert gradients.warnings[-1].startswith("B ended before backward of step 0 was over")


def test_a_side_a_that_failed_is_never_exceeded():
    """When A ran out of memory, B is not worse for holding more than A got to."""
    peaks = {"forward": {"parameters": GIB, "activations": 2 * GIB}}
    series = make_rank(0, peaks=peaks, anatomy=False, resident={"parameters": GIB})
    a = make_run("a", ranks=[series], failure=OOM)
    result = compare_with_diff([a], [make_run(world_size=1)], make_diff())
    peak = next(m for m in result.metrics if m.name == "peak_allocated_bytes" and m.rank == 0)
    assert (peak.a, peak.b, peak.verdict) == (3 * GIB, 4 * GIB, "unclear")
    assert not [m for m in result.metrics if m.name == "out_of_memory_bytes"]


def test_another_failure_after_steady_steps_keeps_its_verdicts():
    """A run that was killed late has peaks of whole steps: those compare as always."""
    failure = Failure(kind="signal", message="killed", step=9)
    b = make_run(times=[0.1] * 6, failure=failure)
    result = compare_with_diff([make_run(times=[0.1] * 6)], [b], make_diff())
    assert {m.verdict for m in result.metrics if m.unit == "bytes"} == {"same"}


def test_failed_launch_beside_completed_ones_is_left_out():
    """One crashed launch does not distort the others of its side."""
    failure = Failure(kind="signal", message="killed")
    crashed = make_run("x", peaks={"forward": {"activations": MIB}}, failure=failure)
    result = compare_with_diff([make_run()], [crashed, make_run()], make_diff())
    peak = next(m for m in result.metrics if m.name == "peak_allocated_bytes")
    assert (peak.verdict, peak.n_launches) == ("same", (1, 1))
    assert any("left out" in w for w in result.warnings)


def test_recorded_oom_after_checkpointing_was_turned_off():
    """On an H200: recompute.mode is named with the activations that backward held more of."""
    a = load_run(RECORDED / "world-2" / "fsdp2-checkpoint-full")
    result = compare_runs([a], [load_run(RECORDED / "oom" / "fsdp2-reshard")])
    finding = next(f for f in result.findings if f.flags)
    assert finding.flags == ("recompute.mode",)
    assert "4.79 GiB more in activations" in finding.claim
    assert finding.advice
    rows = oom_rows(result)
    assert rows["activations"].value == 5_448_957_952 - 307_528_704
    metric = next(m for m in result.metrics if m.name == "out_of_memory_bytes")
    assert metric.a == 4_707_710_976
    assert metric.b == 8_405_095_936 + (500 << 20)
