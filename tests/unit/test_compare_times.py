"""Times of launches: which steps count, and what drift and gaps do to a verdict."""

from dataclasses import replace

import numpy as np
import pytest
from builders import make_diff, make_rank, make_run

from fsdp_doctor.attribution.compare import compare_with_diff
from fsdp_doctor.attribution.times import launch_times
from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import PhaseRecord, StepRecord
from fsdp_doctor.runs.columns import columns_from


def step_metric(a, b):
    """Return the step time of a comparison."""
    metrics = compare_with_diff(a, b, make_diff()).metrics
    return next(m for m in metrics if m.name == "step_time_s")


def test_steps_with_allocation_retries_are_left_out():
    """A step in which the allocator flushed its cache is no steady step, and that is said."""
    times = [0.1] * 5 + [0.9] + [0.1] * 6
    retries = [0] * 5 + [2] * 7
    run = make_run(times=times, retries=retries)
    found = launch_times(run)
    assert (found.retried, found.step.size) == (1, 11)
    assert found.step.max() == pytest.approx(0.1)
    warnings = step_metric([run], [run]).warnings
    assert "timed steps of A left out for allocation retries: 1" in warnings


def test_a_job_that_always_retries_keeps_its_steps():
    """When most steps retry, that is how the job runs."""
    run = make_run(times=[0.2] * 10, retries=list(range(1, 11)))
    assert launch_times(run).retried == 0
    assert launch_times(run).step.size == 10


def test_steps_that_one_rank_did_not_end_are_left_out():
    """After a crash only the steps that all ranks ended are compared."""
    run = make_run(ranks=[make_rank(0, times=[0.1] * 10), make_rank(1, times=[0.2] * 8)])
    found = launch_times(run)
    assert list(found.step) == [0.2] * 8
    assert found.few


def drifting(scale, rise, seed=0, count=3):
    """Return launches whose steps get slower by ``rise`` from first to last, and noise."""
    rng = np.random.default_rng(seed)
    ramp = scale * np.linspace(1.0, 1.0 + rise, 30)
    return [make_run(times=list(ramp * np.exp(rng.normal(0, 0.002, 30)))) for _ in range(count)]


def test_drift_of_both_sides_hides_no_change():
    """Where all launches drift alike, every part of them shows the change."""
    found = step_metric(drifting(0.1, 0.2), drifting(0.11, 0.2, seed=1))
    assert found.verdict == "worse"
    assert any(w.startswith("not-steady") for w in found.warnings)
    assert step_metric(drifting(0.1, 0.2), drifting(0.1, 0.2, seed=1)).verdict == "same"


def test_drift_of_one_side_widens_the_interval():
    """A side that gets slower by 20 % from an equal start is 9 % slower in all, but the interval
    reaches from what the launches' first two thirds show to what the last two do.
    """
    low, high = step_metric(drifting(0.1, 0.0), drifting(0.1, 0.2, seed=1)).interval
    assert low < 0.065
    assert high > 0.13
    crossing = step_metric(drifting(0.11, 0.0), drifting(0.1, 0.2, seed=1))
    assert crossing.verdict == "unclear"


def advice(a, b):
    """Return what the step time's warnings say would decide."""
    return [w for w in step_metric(a, b).warnings if "would decide" in w]


def ramps(scale, rise, count=3):
    """Return launches whose steps get slower by ``rise`` from first to last."""
    ramp = scale * np.linspace(1.0, 1.0 + rise, 30)
    return [make_run(times=list(ramp)) for _ in range(count)]


def test_drift_asks_for_longer_runs_not_for_launches():
    """Where drift alone hides a difference, no number of launches is promised to show it."""
    (text,) = advice(ramps(0.108, 0.0), ramps(0.1, 0.22))
    assert text == (
        "the drift within launches hides this difference: more warm-up steps or longer runs would "
        "decide it, more launches would not"
    )


@pytest.mark.parametrize("spread", [0.004, 0.008, 0.02, 0.1])
@pytest.mark.parametrize("rise", [0.0, 0.1])
def test_advice_never_asks_for_launches_that_are_there(spread, rise):
    """Any number of launches in the advice is above the number compared."""
    rng = np.random.default_rng(1)
    for _ in range(10):
        sides = [
            [ramps(0.1 * level * np.exp(rng.normal(0, spread)), rise, 1)[0] for _ in range(4)]
            for level in (1.0, 1.02)
        ]
        for text in advice(*sides):
            numbers = [
                int(word) for word in text.replace("than", "about").split() if word.isdigit()
            ]
            floor = 3 if "more than" in text else 4
            assert all(number > floor for number in numbers)


def test_times_of_one_side_only():
    """A simulated run has no times: the metric is None on its side and unclear."""
    timed, untimed = make_run(times=[0.1] * 10), make_run(source="simulated")
    metric = step_metric([timed], [untimed])
    assert (metric.b, metric.delta, metric.verdict) == (None, None, "unclear")
    assert metric.n_launches == (1, 0)
    metrics = compare_with_diff([untimed], [untimed], make_diff()).metrics
    assert not any(m.unit == "s" for m in metrics)


def test_untimed_steps_have_no_time():
    """Times of warm-up and observed steps mean nothing and are not read."""
    run = make_run(times=[0.1] * 6)
    series = [
        replace(r, steps=tuple(replace(s, kind="warmup") for s in r.steps)) for r in run.ranks
    ]
    assert launch_times(replace(run, ranks=tuple(series))).step.size == 0


def test_times_of_a_phase_sum_micro_steps_and_skip_unknown():
    """Two forward passes add up; a phase with one unknown time is unknown."""
    phases = tuple(
        PhaseRecord(step=1, phase=phase, microbatch=micro, time_s=time_s)
        for phase, micro, time_s in (
            (Phase.FORWARD, 0, 0.1),
            (Phase.FORWARD, 1, 0.2),
            (Phase.BACKWARD, 0, 0.3),
            (Phase.BACKWARD, 1, None),
        )
    )
    step = StepRecord(step=1, kind="timed", phases=phases)
    columns = columns_from([step])
    times = dict(zip(columns.phases, columns.time_s[:, 0], strict=True))
    assert times["forward"] == pytest.approx(0.3)
    assert np.isnan(times["backward"])
