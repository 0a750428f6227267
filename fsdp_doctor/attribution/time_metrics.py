"""Metrics of time: the step, its phases, where the time went, and throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fsdp_doctor.attribution.interleaving import interleaving_warnings
from fsdp_doctor.attribution.rank_times import rank_metrics
from fsdp_doctor.attribution.statistics import (
    MIN_LAUNCHES,
    TimeTest,
    benjamini_hochberg,
    holm,
    required_launches,
)
from fsdp_doctor.attribution.sway import job_sway, sway
from fsdp_doctor.attribution.time_rows import (
    adjusted,
    compare_steps,
    judged,
    throughput_row,
    tokens_per_step,
    without_trifles,
)
from fsdp_doctor.attribution.times import EXPOSED, LaunchTimes, launch_times, timed_steps
from fsdp_doctor.model.comparison import Metric
from fsdp_doctor.model.run import Run
from fsdp_doctor.runs.columns import columns_of

if TYPE_CHECKING:
    from fsdp_doctor.attribution.statistics import FloatArray


def time_metrics(a: Sequence[Run], b: Sequence[Run], *, band: float) -> list[Metric]:
    """Compare the times of two sides; ``band`` is the relative change of no interest.

    p-values are adjusted: Holm over step time and throughput, Benjamini-Hochberg over the parts.
    """
    metrics = _time_metrics(a, b, band=band)
    confounded = interleaving_warnings(_timed(a), _timed(b))
    return [_without_verdict(m, confounded) for m in metrics] if confounded else metrics


def _timed(runs: Sequence[Run]) -> list[Run]:
    return [
        run for run in runs if any(timed_steps(columns_of(series)).any() for series in run.ranks)
    ]


def _without_verdict(metric: Metric, reasons: list[str]) -> Metric:
    """Cap a verdict that something besides the config may have caused; the step says why."""
    if metric.name == "step_time_s" and metric.rank is None:
        metric = replace(metric, warnings=(*metric.warnings, *reasons))
    return replace(metric, verdict="unclear", capped=True)


def _time_metrics(a: Sequence[Run], b: Sequence[Run], *, band: float) -> list[Metric]:
    times_a, times_b = [launch_times(run) for run in a], [launch_times(run) for run in b]
    notes = _one_rank_warnings(a, b)
    steps = compare_steps("step_time_s", _steps(times_a), _steps(times_b), band=band, notes=notes)
    if steps is None:
        return _parts(times_a, times_b, None, band=band, notes=notes)
    test, step = steps
    step = replace(step, warnings=(*step.warnings, *_launch_warnings(times_a, times_b)))
    if test is not None:
        test, step = _drifted(test, step, times_a, times_b, band=band)
    primary = [step, *_throughput(test, step, a, b, band=band)]
    parts = _parts(times_a, times_b, step, band=band, notes=notes)
    same_work = tokens_per_step(a) == tokens_per_step(b)
    return [
        *_adjust_primary(primary, same_work=same_work),
        *adjusted(parts, benjamini_hochberg),
        *rank_metrics(a, b, (times_a, times_b), step, band=band, notes=notes),
    ]


def _steps(times: Sequence[LaunchTimes]) -> list[FloatArray]:
    return [t.step for t in times if t.step.size]


def _drifted(
    test: TimeTest,
    step: Metric,
    times_a: Sequence[LaunchTimes],
    times_b: Sequence[LaunchTimes],
    *,
    band: float,
) -> tuple[TimeTest, Metric]:
    """Widen the interval by what drifting steps do to it, and say how many launches are needed."""
    moved = job_sway(times_a, times_b)
    if moved:
        test = test.widened(moved)
        step = judged(step, test, band=band)
    if step.verdict != "unclear":
        return test, step
    advice = _decision_advice(test, band, drifts=moved > 0)
    return test, replace(step, warnings=(*step.warnings, advice))


def _decision_advice(test: TimeTest, band: float, *, drifts: bool) -> str:
    """Say what would decide: more launches, or, where there are enough, steadier ones."""
    needed = required_launches(test, band=band)
    enough = f"about {needed}" if needed is not None else "more than 100"
    if min(test.launches) < MIN_LAUNCHES:
        more = "" if needed == MIN_LAUNCHES else f", for this difference {enough}"
        return (
            f"no verdict on time from {test.launches[0]} and {test.launches[1]} launches: it takes "
            f"at least {MIN_LAUNCHES} interleaved launches a side{more}"
        )
    if needed is not None and needed <= min(test.launches):
        if drifts:
            return (
                "the drift within launches hides this difference: more warm-up steps or longer "
                "runs would decide it, more launches would not"
            )
        enough = f"more than {min(test.launches)}"
    steadier = ", each with more warm-up or longer," if drifts else ""
    return f"{enough} launches a side{steadier} would decide this difference"


def _launch_warnings(a: Sequence[LaunchTimes], b: Sequence[LaunchTimes]) -> list[str]:
    warnings = []
    for side, times in (("A", a), ("B", b)):
        timed = [t for t in times if t.step.size]
        count = len(timed)
        drifts = [t.drift for t in timed if t.drift]
        if drifts:
            warnings.append(
                f"not-steady: step times drift by up to {math.expm1(max(drifts)) * 100:.0f} % "
                f"within {len(drifts)} of {count} launches of {side}"
            )
        few = [t.step.size for t in timed if t.few]
        if few:
            warnings.append(f"timed steps in a launch of {side}: only {min(few)}")
        if retried := sum(t.retried for t in timed):
            warnings.append(f"timed steps of {side} left out for allocation retries: {retried}")
        if dropped := sum(t.dropped for t in timed):
            warnings.append(f"timed steps of {side} left out as warm-up: {dropped}")
    return warnings


def _one_rank_warnings(a: Sequence[Run], b: Sequence[Run]) -> tuple[str, ...]:
    sides = [
        side
        for side, runs in (("A", a), ("B", b))
        if any(run.manifest.source == "one_rank" for run in runs)
    ]
    if not sides:
        return ()
    return (f"{' and '.join(sides)} ran one rank alone: its times lack communication",)


def _throughput(
    test: TimeTest | None, step: Metric, a: Sequence[Run], b: Sequence[Run], *, band: float
) -> list[Metric]:
    work_a, work_b = tokens_per_step(a), tokens_per_step(b)
    metric = throughput_row(step, work_a, work_b)
    if metric is None or test is None or not metric.a or not metric.b:
        return [metric] if metric else []
    return [judged(metric, test.throughput(work_b / work_a), band=band)]


def _parts(
    a: Sequence[LaunchTimes],
    b: Sequence[LaunchTimes],
    step: Metric | None,
    *,
    band: float,
    notes: tuple[str, ...],
) -> list[Metric]:
    """Compare phases and, within them, where the time went; and what is waited for in all."""
    keys: set[tuple[str, str]] = {(phase, "") for t in (*a, *b) for phase in t.phases}
    keys |= {key for t in (*a, *b) for key in t.breakdown}
    drifts = any(t.drift for t in (*a, *b))
    found = [
        compare_steps(
            "phase_time_s",
            _part(a, phase, part),
            _part(b, phase, part),
            band=band,
            notes=notes,
            phase=phase,
            category=part or None,
        )
        for phase, part in sorted(keys)
    ]
    found.append(compare_steps(EXPOSED, _exposed(a), _exposed(b), band=band, notes=notes))
    metrics = []
    for compared in found:
        if compared is None:
            continue
        test, metric = compared
        if test is not None and drifts and metric.phase is not None:
            moved = sway(*(_part(side, metric.phase, metric.category or "") for side in (a, b)))
            metric = judged(metric, test.widened(moved), band=band)
        metrics.append(without_trifles(metric, step))
    return metrics


def _part(times: Sequence[LaunchTimes], phase: str, part: str) -> list[FloatArray]:
    if part:
        return [np.array([t.breakdown[phase, part]]) for t in times if (phase, part) in t.breakdown]
    return [t.phases[phase] for t in times if phase in t.phases]


def _exposed(times: Sequence[LaunchTimes]) -> list[FloatArray]:
    return [np.array([t.exposed]) for t in times if t.exposed is not None]


def _adjust_primary(metrics: list[Metric], *, same_work: bool) -> list[Metric]:
    """Adjust step time and throughput; over the same tokens they are one hypothesis."""
    if same_work:
        return [one for m in metrics for one in adjusted([m], holm)]
    return adjusted(metrics, holm)
