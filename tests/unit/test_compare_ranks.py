"""Times of single ranks: judged like those of the job, and summed up for many ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from builders import make_diff, make_rank, make_run

from fsdp_doctor.attribution.compare import compare_with_diff
from fsdp_doctor.model.comparison import Comparison, Metric
from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import Run, TimeBreakdown
from fsdp_doctor.report import render_comparison

STEPS = 12


def launches(
    seed: int, *, ranks: int = 4, count: int = 3, late: int | None = None, exposed_s: float = 0.0
) -> list[Run]:
    """Return launches of steps of 100 ms; the rank ``late`` needs 10 ms more in forward and waits
    so much less in backward.
    """
    rng = np.random.default_rng(seed)
    runs = []
    for _ in range(count):
        step = 0.1 * np.exp(rng.normal(0, 0.001)) * np.exp(rng.normal(0, 0.001, STEPS))
        series = []
        for rank in range(ranks):
            forward = 0.03 * np.exp(rng.normal(0, 0.001, STEPS)) + (0.01 if rank == late else 0.0)
            breakdown = [
                TimeBreakdown(
                    phase=phase,
                    wall_s=0.05,
                    kernel_s=0.04,
                    exposed_communication_s=exposed_s * (1 + rank) * np.exp(rng.normal(0, 0.001)),
                    communication_s=0.02,
                    copy_s=0.0,
                    idle_s=0.0,
                )
                for phase in (Phase.FORWARD, Phase.BACKWARD)
            ]
            series.append(
                make_rank(
                    rank,
                    times=step.tolist(),
                    phase_times={
                        "forward": forward.tolist(),
                        "backward": (step - forward).tolist(),
                    },
                    breakdown=breakdown if exposed_s else (),
                )
            )
        runs.append(make_run(ranks=series, world_size=ranks))
    return runs


def rows(comparison: Comparison, name: str, phase: str | None = None) -> dict[int | None, Metric]:
    """Return rank -> row of a metric."""
    found = [m for m in comparison.metrics if (m.name, m.phase, m.category) == (name, phase, None)]
    return {m.rank: m for m in found}


def compared(a: Sequence[Run], b: Sequence[Run]) -> Comparison:
    """Compare two sides of one config."""
    return compare_with_diff(a, b, make_diff())


def test_a_rank_that_got_slower_is_told_from_those_that_wait_for_it():
    """Only its forward pass is worse, and only its backward pass, in which it waits, is better."""
    comparison = compared(launches(1), launches(2, late=2))
    forward, backward = (rows(comparison, "phase_time_s", p) for p in ("forward", "backward"))
    assert {rank: row.verdict for rank, row in forward.items() if rank is not None} == {
        0: "same", 1: "same", 2: "worse", 3: "same",
    }  # fmt: skip
    assert backward[2].verdict == "better"
    assert forward[2].relative == pytest.approx(1 / 3, abs=0.02)
    assert forward[2].interval is not None
    assert forward[2].n_launches == (3, 3)
    assert forward[2].n_steps == (3 * STEPS, 3 * STEPS)
    assert {row.verdict for row in rows(comparison, "step_time_s").values()} == {"same"}


def test_single_launches_give_ranks_no_verdict():
    """Their numbers stand, without an interval."""
    comparison = compared(launches(1, count=1), launches(2, count=1, late=2))
    forward = rows(comparison, "phase_time_s", "forward")[2]
    assert (forward.verdict, forward.interval, forward.p) == ("unclear", None, None)
    assert forward.delta == pytest.approx(0.01, rel=0.02)


def test_tokens_of_the_ranks_are_those_of_the_job():
    """Each rank has its share, by its own steps; the verdict is that of its step time."""
    comparison = compared(launches(1), launches(2))
    tokens, steps = rows(comparison, "tokens_per_s"), rows(comparison, "step_time_s")
    whole = tokens.pop(None)
    assert sum(row.a for row in tokens.values()) == pytest.approx(whole.a)
    assert {rank: row.verdict for rank, row in tokens.items()} == {
        rank: row.verdict for rank, row in steps.items() if rank is not None
    }


def test_exposed_communication_of_the_step_and_of_each_rank():
    """Phases add up; the job's is that of the rank with the most; a lone rank has none."""
    a, b = launches(1, exposed_s=0.001), launches(2, exposed_s=0.002)
    found = rows(compared(a, b), "exposed_communication_s")
    assert {rank: round(row.a, 3) for rank, row in found.items()} == {
        None: 0.008, 0: 0.002, 1: 0.004, 2: 0.006, 3: 0.008,
    }  # fmt: skip
    assert {row.verdict for row in found.values()} == {"worse"}
    alone = [make_run(source="one_rank", ranks=run.ranks[:1]) for run in a]
    assert rows(compared(alone, alone), "exposed_communication_s") == {}


def test_rows_are_of_ranks_that_both_sides_recorded():
    """A rank that one side lacks has no row."""
    comparison = compared(launches(1), launches(2, ranks=2))
    assert set(rows(comparison, "phase_time_s", "forward")) == {None, 0, 1}


def test_many_ranks_are_summed_up_in_the_terminal():
    """A line a metric, the worst rank named, within 80 columns."""
    a, b = launches(1, ranks=70), launches(2, ranks=70, late=41)
    text = render_comparison(compared(a, b), a, b, "terminal", width=80)
    (line,) = (line for line in text.splitlines() if line.startswith("time, forward   1 worse"))
    assert " ".join(line.split()[4:]) == "69 same 41 30.0 ms 40.0 ms +33.3 %"
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 80


def test_the_ranks_of_a_wide_report_are_the_worst():
    """Sixteen of a metric; the rest is counted."""
    a, b = launches(1, ranks=40, count=1), launches(2, ranks=40, count=1, late=17)
    text = render_comparison(compared(a, b), a, b, "markdown")
    listed = [line for line in text.splitlines() if line.startswith("| time, forward, rank ")]
    assert len(listed) == 16
    assert "rank 17 " in listed[0]
    assert "rows are left" in text
