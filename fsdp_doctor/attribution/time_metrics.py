"""Metrics of time: the step, its phases, where the time went, and throughput."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fsdp_doctor.attribution.interleaving import interleaving_warnings
from fsdp_doctor.attribution.statistics import (
    ALPHA,
    MIN_LAUNCHES,
    TimeTest,
    benjamini_hochberg,
    compare_samples,
    holm,
    required_launches,
    time_verdict,
)
from fsdp_doctor.attribution.times import LaunchTimes, launch_times, timed_steps
from fsdp_doctor.model.comparison import Metric
from fsdp_doctor.model.run import Run
from fsdp_doctor.runs.columns import columns_of

if TYPE_CHECKING:
    from fsdp_doctor.attribution.statistics import FloatArray

Adjustment = Callable[[Sequence[float]], list[float]]

SMALL_PART = 0.001
"""Share of the step time below which the change of a part of the step is ``same``."""


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
    if metric.name == "step_time_s":
        metric = replace(metric, warnings=(*metric.warnings, *reasons))
    return replace(metric, verdict="unclear", capped=True)


def _time_metrics(a: Sequence[Run], b: Sequence[Run], *, band: float) -> list[Metric]:
    times_a, times_b = [launch_times(run) for run in a], [launch_times(run) for run in b]
    notes = _one_rank_warnings(a, b)
    steps = _compare("step_time_s", _steps(times_a), _steps(times_b), band=band, notes=notes)
    if steps is None:
        return _parts(times_a, times_b, None, band=band, notes=notes)
    test, step = steps
    step = replace(step, warnings=(*step.warnings, *_launch_warnings(times_a, times_b)))
    if test is None:
        primary = [step, *_lone_throughput(step, a, b)]
    else:
        test, step = _drifted(test, step, times_a, times_b, band=band)
        primary = [step, *_throughput(test, step, a, b, band=band)]
    parts = _parts(times_a, times_b, step, band=band, notes=notes)
    same_work = _tokens(a) == _tokens(b)
    return [
        *_adjust_primary(primary, same_work=same_work),
        *_adjust(parts, benjamini_hochberg),
    ]


def _steps(times: Sequence[LaunchTimes]) -> list[FloatArray]:
    return [t.step for t in times if t.step.size]


def _compare(
    name: str,
    a: list[FloatArray],
    b: list[FloatArray],
    *,
    band: float,
    notes: tuple[str, ...],
    phase: str | None = None,
    category: str | None = None,
) -> tuple[TimeTest | None, Metric] | None:
    """Compare seconds per launch and step; None when neither side has any."""
    if not a and not b:
        return None
    value_a, value_b = _location(a), _location(b)
    metric = Metric(
        name=name,
        unit="s",
        better="lower",
        rank=None,
        phase=phase,
        category=category,
        a=value_a,
        b=value_b,
        delta=None if value_a is None or value_b is None else value_b - value_a,
        relative=value_b / value_a - 1 if value_a and value_b is not None else None,
        n_launches=(len(a), len(b)),
        n_steps=(sum(x.size for x in a), sum(x.size for x in b)),
        warnings=notes,
    )
    if not value_a or not value_b:
        return None, metric
    if min(float(x.min()) for x in (*a, *b)) <= 0.0:
        return None, metric
    test = compare_samples([np.log(x) for x in a], [np.log(x) for x in b])
    return test, _judged(metric, test, band=band)


def _location(launches: list[FloatArray]) -> float | None:
    """Return the geometric mean of the launches' medians."""
    medians = [float(np.median(x)) for x in launches]
    if not medians:
        return None
    if min(medians) <= 0.0:
        return float(np.mean(medians))
    return float(np.exp(np.mean(np.log(medians))))


def _judged(metric: Metric, test: TimeTest, *, band: float) -> Metric:
    verdict = time_verdict(test, band=band, higher=metric.better == "higher")
    return replace(
        metric,
        interval=(math.expm1(test.low), math.expm1(test.high)),
        p=test.p,
        verdict=verdict,
    )


def _drifted(
    test: TimeTest,
    step: Metric,
    times_a: Sequence[LaunchTimes],
    times_b: Sequence[LaunchTimes],
    *,
    band: float,
) -> tuple[TimeTest, Metric]:
    """Widen the interval by the largest drift within a launch, and say how many are needed."""
    drift = max(t.drift for t in (*times_a, *times_b))
    if drift:
        test = test.widened(drift)
        step = _judged(step, test, band=band)
    if step.verdict != "unclear":
        return test, step
    advice = _decision_advice(test, band, drifts=drift > 0)
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
    test: TimeTest, step: Metric, a: Sequence[Run], b: Sequence[Run], *, band: float
) -> list[Metric]:
    metric = _tokens_metric(step, a, b)
    if metric is None or not metric.a or not metric.b:
        return [metric] if metric else []
    return [_judged(metric, test.throughput(_tokens(b) / _tokens(a)), band=band)]


def _lone_throughput(step: Metric, a: Sequence[Run], b: Sequence[Run]) -> list[Metric]:
    metric = _tokens_metric(step, a, b)
    return [metric] if metric else []


def _tokens(runs: Sequence[Run]) -> int:
    return next((t for run in runs if (t := run.manifest.tokens_per_step)), 0)


def _tokens_metric(step: Metric, a: Sequence[Run], b: Sequence[Run]) -> Metric | None:
    tokens_a, tokens_b = _tokens(a), _tokens(b)
    value_a = tokens_a / step.a if tokens_a and step.a else None
    value_b = tokens_b / step.b if tokens_b and step.b else None
    if value_a is None and value_b is None:
        return None
    both = value_a is not None and value_b is not None
    return replace(
        step,
        name="tokens_per_s",
        unit="tokens/s",
        better="higher",
        a=value_a,
        b=value_b,
        delta=value_b - value_a if value_a is not None and value_b is not None else None,
        relative=value_b / value_a - 1 if both and value_a and value_b else None,
        interval=None,
        p=None,
        verdict="unclear",
    )


def _parts(
    a: Sequence[LaunchTimes],
    b: Sequence[LaunchTimes],
    step: Metric | None,
    *,
    band: float,
    notes: tuple[str, ...],
) -> list[Metric]:
    """Compare phases and, within them, where the time went."""
    keys: set[tuple[str, str]] = {(phase, "") for t in (*a, *b) for phase in t.phases}
    keys |= {key for t in (*a, *b) for key in t.breakdown}
    drift = max((t.drift for t in (*a, *b)), default=0.0)
    metrics = []
    for phase, part in sorted(keys):
        compared = _compare(
            "phase_time_s",
            _part(a, phase, part),
            _part(b, phase, part),
            band=band,
            notes=notes,
            phase=phase,
            category=part or None,
        )
        if compared is None:
            continue
        test, metric = compared
        if test is not None and drift:
            metric = _judged(metric, test.widened(drift), band=band)
        metrics.append(_without_trifles(metric, step))
    return metrics


def _part(times: Sequence[LaunchTimes], phase: str, part: str) -> list[FloatArray]:
    if part:
        return [np.array([t.breakdown[phase, part]]) for t in times if (phase, part) in t.breakdown]
    return [t.phases[phase] for t in times if phase in t.phases]


def _without_trifles(metric: Metric, step: Metric | None) -> Metric:
    """Turn a firm verdict on a part into ``same`` when the step cannot feel the difference."""
    if step is None or not step.a or metric.delta is None:
        return metric
    if metric.verdict in ("worse", "better") and abs(metric.delta) < SMALL_PART * step.a:
        return replace(metric, verdict="same")
    return metric


def _adjust(metrics: list[Metric], method: Adjustment) -> list[Metric]:
    """Replace p-values by adjusted ones; a difference is firm only with one below ALPHA."""
    known = [m.p for m in metrics if m.p is not None]
    adjusted = iter(method(known))
    return [m if m.p is None else _with_p(m, next(adjusted)) for m in metrics]


def _adjust_primary(metrics: list[Metric], *, same_work: bool) -> list[Metric]:
    """Adjust step time and throughput; over the same tokens they are one hypothesis."""
    if same_work:
        return [adjusted for m in metrics for adjusted in _adjust([m], holm)]
    return _adjust(metrics, holm)


def _with_p(metric: Metric, p: float) -> Metric:
    firm = metric.verdict in ("worse", "better")
    return replace(metric, p=p, verdict="unclear" if firm and p >= ALPHA else metric.verdict)
