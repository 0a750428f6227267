"""Rows of times: the numbers of both sides, judged, and their p-values adjusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fsdp_doctor.attribution.statistics import ALPHA, TimeTest, compare_samples, time_verdict
from fsdp_doctor.model.comparison import Metric
from fsdp_doctor.model.run import Run

if TYPE_CHECKING:
    from fsdp_doctor.attribution.statistics import FloatArray

Adjustment = Callable[[Sequence[float]], list[float]]

SMALL_PART = 0.001
"""Share of the step time below which the change of a part of the step is ``same``."""


def time_row(
    name: str,
    a: Sequence[float],
    b: Sequence[float],
    *,
    rank: int | None = None,
    phase: str | None = None,
    category: str | None = None,
    n_steps: tuple[int, int],
    notes: tuple[str, ...] = (),
) -> Metric:
    """Return the row of a time that has one number, in seconds, from each launch; not judged."""
    value_a, value_b = _location(a), _location(b)
    return Metric(
        name=name,
        unit="s",
        better="lower",
        rank=rank,
        phase=phase,
        category=category,
        a=value_a,
        b=value_b,
        delta=None if value_a is None or value_b is None else value_b - value_a,
        relative=value_b / value_a - 1 if value_a and value_b is not None else None,
        n_launches=(len(a), len(b)),
        n_steps=n_steps,
        warnings=notes,
    )


def _location(launches: Sequence[float]) -> float | None:
    """Return the geometric mean of the launches' numbers."""
    if not launches:
        return None
    if min(launches) <= 0.0:
        return float(np.mean(launches))
    return float(np.exp(np.mean(np.log(launches))))


def compare_steps(
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
    row = time_row(
        name,
        [float(np.median(x)) for x in a],
        [float(np.median(x)) for x in b],
        phase=phase,
        category=category,
        n_steps=(sum(x.size for x in a), sum(x.size for x in b)),
        notes=notes,
    )
    if not row.a or not row.b or min(float(x.min()) for x in (*a, *b)) <= 0.0:
        return None, row
    test = compare_samples([np.log(x) for x in a], [np.log(x) for x in b])
    return test, judged(row, test, band=band)


def judged(metric: Metric, test: TimeTest, *, band: float) -> Metric:
    """Return the row with interval, p and verdict of a test."""
    verdict = time_verdict(test, band=band, higher=metric.better == "higher")
    return replace(
        metric,
        interval=(math.expm1(test.low), math.expm1(test.high)),
        p=test.p,
        verdict=verdict,
    )


def without_trifles(metric: Metric, step: Metric | None) -> Metric:
    """Turn a firm verdict on a part into ``same`` when the step cannot feel the difference."""
    if step is None or not step.a or metric.delta is None:
        return metric
    if metric.verdict in ("worse", "better") and abs(metric.delta) < SMALL_PART * step.a:
        return replace(metric, verdict="same")
    return metric


def throughput_row(step: Metric, work_a: float, work_b: float) -> Metric | None:
    """Return tokens/s from a step time and the tokens of a step, not judged; None: not known."""
    value_a = work_a / step.a if work_a and step.a else None
    value_b = work_b / step.b if work_b and step.b else None
    if value_a is None and value_b is None:
        return None
    known = value_a is not None and value_b is not None
    return replace(
        step,
        name="tokens_per_s",
        unit="tokens/s",
        better="higher",
        a=value_a,
        b=value_b,
        delta=value_b - value_a if value_a is not None and value_b is not None else None,
        relative=value_b / value_a - 1 if known and value_a and value_b else None,
        interval=None,
        p=None,
        verdict="unclear",
    )


def tokens_per_step(runs: Sequence[Run]) -> int:
    """Return the tokens of a step over all ranks; 0: not known."""
    return next((t for run in runs if (t := run.manifest.tokens_per_step)), 0)


def adjusted(metrics: Sequence[Metric], method: Adjustment) -> list[Metric]:
    """Replace p-values by adjusted ones; a difference is firm only with one below ALPHA."""
    values = iter(method([m.p for m in metrics if m.p is not None]))
    return [m if m.p is None else _with_p(m, next(values)) for m in metrics]


def _with_p(metric: Metric, p: float) -> Metric:
    firm = metric.verdict in ("worse", "better")
    return replace(metric, p=p, verdict="unclear" if firm and p >= ALPHA else metric.verdict)
