"""Details of reports that are easy to get wrong: failing moments, labels, large factors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import DEFAULT_PEAKS, GIB, make_diff, make_rank, make_run, make_step

from fsdp_doctor.attribution.compare import compare_runs, compare_with_diff
from fsdp_doctor.model.run import RankSeries
from fsdp_doctor.report import facts, render_comparison, render_runs
from fsdp_doctor.runs import load_run

RECORDED = Path(__file__).parent.parent.parent / "profiles" / "h200"


def section(text: str, title: str) -> str:
    """Return a section of a Markdown report."""
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_an_out_of_memory_report_leads_with_the_failing_phase() -> None:
    """What was alive in backward and the request come first; nothing stays between steps."""
    text = render_runs([load_run(RECORDED / "oom" / "fsdp2-reshard")], "markdown")
    filled = section(text, "What filled the memory")
    assert filled.index("In backward, which failed") < filled.index("in forward")
    assert "| **all** | **7.83 GiB** |" in filled
    assert "It asked for 500.00 MiB more: 8.32 GiB in all." in filled
    assert "between steps" not in filled
    assert "- steps: 1 unfinished\n" in text


def test_a_finished_step_shows_what_stays() -> None:
    """A completed run has no failing phase and keeps the column of resident bytes."""
    filled = section(render_runs([make_run()], "markdown"), "What filled the memory")
    assert "between steps" in filled
    assert "failed" not in filled


def test_a_failed_step_of_known_kind_says_so() -> None:
    """A recording that knows that the failing step was observed says observed."""
    run = load_run(RECORDED / "oom" / "fsdp2-reshard")
    (series,) = run.ranks
    known = replace(series, steps=tuple(replace(s, kind="observed") for s in series.steps))
    text = render_runs([replace(run, ranks=(known,))], "markdown")
    assert "- steps: 1 observed (unfinished)\n" in text


def test_the_flag_behind_an_oom_leads_the_attribution() -> None:
    """The table of the failing moment is shown with those over the whole run."""
    runs = [load_run(RECORDED / "world-2" / "fsdp2-checkpoint-full")]
    failed = [load_run(RECORDED / "oom" / "fsdp2-reshard")]
    text = render_comparison(compare_runs(runs, failed), runs, failed, "markdown")
    table = section(text, "Which field did it")
    assert "alive and asked for, backward, rank 0" in table
    assert "| activations | `recompute.mode` | **+4.79 GiB**" in table


def test_a_moved_peak_comes_with_the_phase_that_tells_why() -> None:
    """The division of the peak says that it is of two phases; that of backward follows."""
    names = ("fsdp2-reshard", "fsdp2-checkpoint-full")
    a, b = ([load_run(RECORDED / "world-2" / name)] for name in names)
    table = section(render_comparison(compare_runs(a, b), a, b, "markdown"), "Which field did it")
    assert "The peak moved from backward to optimizer: these bytes are of two phases." in table
    assert "peak allocated, backward" in table


def test_reserved_memory_is_never_called_exact() -> None:
    """Numbers that differ between identical launches carry the launches they come from."""
    runs = [make_run(reserved=8 * GIB), make_run(reserved=8 * GIB)]
    comparison = compare_with_diff(runs, runs, make_diff())
    lines = render_comparison(comparison, runs, runs, "markdown").splitlines()
    (reserved,) = [line for line in lines if line.startswith("| peak reserved |")]
    (allocated,) = [line for line in lines if line.startswith("| peak allocated |")]
    assert "| 2+2 |" in reserved
    assert "| exact |" in allocated


def test_a_huge_factor_is_cut() -> None:
    """From 512 bytes to gigabytes the factor tells nothing but that A held next to nothing."""
    few = {**DEFAULT_PEAKS, "backward": {**DEFAULT_PEAKS["backward"], "logits": 512}}
    many = {**DEFAULT_PEAKS, "backward": {**DEFAULT_PEAKS["backward"], "logits": 4 * GIB}}
    a, b = [make_run(peaks=few)], [make_run(peaks=many)]
    text = render_comparison(compare_with_diff(a, b, make_diff()), a, b, "terminal")
    rows = [line for line in text.splitlines() if line.startswith("logits ")]
    assert "x 1,000+" in rows[0]


@pytest.mark.parametrize(("used", "outside"), [(9 * GIB, GIB), (7 * GIB, None), (None, None)])
def test_outside_memory_is_never_negative(used: int | None, outside: int | None) -> None:
    """Counters that contradict each other give no number, in reports as in comparisons."""
    step = make_step(0, "observed", DEFAULT_PEAKS, reserved=8 * GIB, device_used=used)
    assert facts.outside_pytorch_bytes(RankSeries(rank=0, steps=(step,))) == outside
    run = make_run(ranks=[replace(make_rank(0), steps=(step,))], world_size=1)
    metrics = compare_with_diff([run], [run], make_diff()).metrics
    found = [m.a for m in metrics if m.name == "outside_pytorch_bytes" and m.rank is None]
    assert found == ([] if outside is None else [outside])
