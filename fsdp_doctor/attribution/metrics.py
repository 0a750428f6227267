"""All metrics of a comparison, most important first. Memory here, time in ``time_metrics``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fsdp_doctor.attribution.metric_kinds import METRIC_KINDS
from fsdp_doctor.attribution.observations import (
    VARYING,
    Observations,
    Observed,
    Place,
    observe,
)
from fsdp_doctor.attribution.statistics import (
    DEFAULT_BAND,
    exact_verdict,
    memory_threshold,
    range_verdict,
)
from fsdp_doctor.attribution.time_metrics import time_metrics
from fsdp_doctor.model.comparison import Metric, Verdict
from fsdp_doctor.model.run import Run
from fsdp_doctor.units import format_bytes

VARYING_SHARE = 0.03
"""How much they differ: reserved memory of identical ranks and launches on H200 (measured)."""
_ORDER = tuple(METRIC_KINDS)


def compare_metrics(
    a: Sequence[Run], b: Sequence[Run], *, band: float = DEFAULT_BAND
) -> tuple[Metric, ...]:
    """Compare the launches of two sides in every number they recorded.

    ``band``: relative change of step time of no interest. What one side lacks is None and
    ``unclear``. Rows of a rank appear when both sides recorded it.
    """
    metrics = time_metrics(a, b, band=band) + memory_metrics(a, b)
    return tuple(sorted(metrics, key=_importance))


def _importance(metric: Metric) -> tuple[int, int, bool, str, str]:
    rank = -1 if metric.rank is None else metric.rank
    return (
        _ORDER.index(metric.name),
        rank,
        metric.phase is not None,
        metric.phase or "",
        metric.category or "",
    )


def memory_metrics(a: Sequence[Run], b: Sequence[Run]) -> list[Metric]:
    """Compare memory and allocator counters; bytes stay exact integers."""
    launches_a, launches_b = [observe(run) for run in a], [observe(run) for run in b]
    sides = (_sides(launches_a), _sides(launches_b))
    common = _ranks(launches_a) & _ranks(launches_b)
    least = max(run.manifest.memory_resolution_bytes for run in (*a, *b))
    metrics = []
    for place in sides[0].keys() | sides[1].keys():
        if place.rank is not None and place.rank not in common:
            continue
        of_a, of_b = (_of(side, place) for side in sides)
        if place.category is None or any(x.value for x in (*of_a, *of_b)):
            metrics.append(_metric(place, of_a, of_b, least))
    return metrics


def _ranks(launches: Sequence[Observations]) -> set[int]:
    return {place.rank for found in launches for place in found if place.rank is not None}


def _sides(launches: Sequence[Observations]) -> dict[Place, list[Observed]]:
    side: dict[Place, list[Observed]] = {}
    for found in launches:
        for place, observed in found.items():
            side.setdefault(place, []).append(observed)
    return side


def _of(side: dict[Place, list[Observed]], place: Place) -> list[Observed]:
    """Return a place's numbers; a category absent from a known anatomy holds 0 bytes."""
    if place in side or place.category is None:
        return side.get(place, [])
    known = any(other[:3] == place[:3] for other in side)
    return [Observed(0, 0, 0)] if known else []


def _metric(place: Place, a: list[Observed], b: list[Observed], least: int) -> Metric:
    value_a, value_b = _largest(a), _largest(b)
    delta = None if value_a is None or value_b is None else value_b - value_a
    verdict, warnings = _judge(place, a, b, least)
    unit: Literal["count", "bytes"] = "count" if place.name == "allocation_retries" else "bytes"
    return Metric(
        name=place.name,
        unit=unit,
        better="lower",
        rank=place.rank,
        phase=place.phase,
        category=place.category,
        a=value_a,
        b=value_b,
        delta=delta,
        relative=value_b / value_a - 1 if value_a and value_b is not None else None,
        n_launches=(len(a), len(b)),
        verdict=verdict,
        warnings=tuple(warnings),
        delta_range=_delta_range(place, a, b),
    )


def _delta_range(place: Place, a: list[Observed], b: list[Observed]) -> tuple[int, int] | None:
    """Return the smallest and largest difference of numbers that vary; None: exact or not known."""
    if not a or not b:
        return None
    by_steps = place.name in VARYING
    (low_a, high_a), (low_b, high_b) = (_range(side, by_steps=by_steps) for side in (a, b))
    low, high = low_b - high_a, high_b - low_a
    return None if low == high and not by_steps else (low, high)


def _largest(launches: list[Observed]) -> int | None:
    return max((x.value for x in launches), default=None)


def _judge(
    place: Place, a: list[Observed], b: list[Observed], least: int
) -> tuple[Verdict, list[str]]:
    """Judge a number; ``least``: bytes to which it is rounded."""
    if not a or not b:
        return "unclear", [f"not recorded in {'A' if not a else 'B'}"]
    value_a, value_b = max(x.value for x in a), max(x.value for x in b)
    counted = place.name == "allocation_retries"
    threshold = 1 if counted else max(memory_threshold(value_a), least)
    warnings = [
        warning
        for side, launches in (("A", a), ("B", b))
        for warning in _variation(side, launches, threshold, counted=counted)
    ]
    by_steps = place.name in VARYING
    range_a, range_b = _range(a, by_steps=by_steps), _range(b, by_steps=by_steps)
    if range_a[0] == range_a[1] and range_b[0] == range_b[1]:
        verdict = exact_verdict(value_a, value_b, threshold=threshold)
    else:
        verdict = range_verdict(range_a, range_b, threshold=threshold)
    lone = by_steps and min(len(a), len(b)) == 1
    if lone and verdict != "same" and abs(value_b - value_a) < VARYING_SHARE * value_a:
        warnings.append(
            f"differs by up to {VARYING_SHARE * 100:.0f} % between identical launches; "
            "record more than one a side"
        )
        verdict = "unclear"
    return verdict, warnings


def _range(launches: list[Observed], *, by_steps: bool) -> tuple[int, int]:
    if by_steps:
        return min(x.low for x in launches), max(x.high for x in launches)
    return min(x.value for x in launches), max(x.value for x in launches)


def _variation(side: str, launches: list[Observed], threshold: int, *, counted: bool) -> list[str]:
    def text(low: int, high: int) -> str:
        return f"{low} - {high}" if counted else f"{format_bytes(low)} - {format_bytes(high)}"

    low, high = _range(launches, by_steps=False)
    if high - low >= threshold:
        return [f"varies between the launches of {side}: {text(low, high)}"]
    low, high = _range(launches, by_steps=True)
    if high - low >= threshold:
        return [f"varies between the steps of {side}: {text(low, high)}"]
    return []
