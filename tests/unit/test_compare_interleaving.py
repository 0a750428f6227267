"""Verdicts on time need launches that alternate on the same hosts."""

import numpy as np
import pytest
from builders import make_diff, make_run

from fsdp_doctor.attribution.compare import compare_with_diff

ALTERNATING = ([0, 3, 4], [1, 2, 5])
A_FIRST = ([0, 1, 2], [3, 4, 5])
B_FIRST = ([3, 4, 5], [0, 1, 2])


def side(rng, minutes, seconds=0.1, **options):
    """Return launches that began at these minutes."""
    return [
        make_run(
            times=list(seconds * np.exp(rng.normal(0, 0.002, 12))),
            created=f"2026-01-01T00:{minute:02d}:00+00:00",
            **options,
        )
        for minute in minutes
    ]


def step_metric(order, **options_b):
    """Compare launches of which those of B take twice as long; return step time and the rest."""
    rng = np.random.default_rng(0)
    a, b = side(rng, order[0], host="one"), side(rng, order[1], 0.2, **{"host": "one", **options_b})
    metrics = compare_with_diff(a, b, make_diff()).metrics
    times = [m for m in metrics if m.unit in ("s", "tokens/s")]
    return next(m for m in times if m.name == "step_time_s"), times


def test_alternating_launches_get_a_verdict():
    """A B B A A B on one host: twice the time is worse, without a warning on order."""
    step, _ = step_metric(ALTERNATING)
    assert step.verdict == "worse"
    assert not any("ran before" in w or "hosts" in w for w in step.warnings)


@pytest.mark.parametrize(("order", "first"), [(A_FIRST, "A"), (B_FIRST, "B")])
def test_one_side_before_the_other_gets_none(order, first):
    """All of one side before all of the other: unclear, for a drift would look the same."""
    step, times = step_metric(order)
    assert {m.verdict for m in times} == {"unclear"}
    assert any(w.startswith(f"all launches of {first} ran before") for w in step.warnings)


def test_other_hosts_get_none():
    """Launches of A and B on different hosts differ in more than the config."""
    step, times = step_metric(ALTERNATING, host="two")
    assert {m.verdict for m in times} == {"unclear"}
    assert any("different hosts (one -> two)" in w for w in step.warnings)


def test_an_order_that_is_not_known_is_not_claimed():
    """Launches without a readable time stamp are taken as they are."""
    rng = np.random.default_rng(0)
    a = [make_run(times=[0.1] * 12, created="yesterday") for _ in range(3)]
    metrics = compare_with_diff(a, side(rng, [0, 1, 2], 0.2), make_diff()).metrics
    assert next(m for m in metrics if m.name == "step_time_s").verdict == "worse"
