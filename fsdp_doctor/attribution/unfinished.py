"""A side that ran out of memory, or never got to a steady step, knows lower bounds only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_doctor.model.comparison import Metric, Verdict
from fsdp_doctor.model.run import Run
from fsdp_doctor.runs.summary import steady_steps

_EXCEEDS: dict[str, Verdict] = {"B": "worse", "A": "better"}
"""Side whose bytes are lower bounds -> the one verdict that they allow."""
_SET_UP = frozenset({"init", "load", "wrap"})
"""Phases that are over before the first step."""


_NOWHERE = "its steps were over"


def bounded(metrics: Sequence[Metric], a: Sequence[Run], b: Sequence[Run]) -> tuple[Metric, ...]:
    """Return the metrics with the verdicts that lower bounds allow, and a warning at the others.

    A lower bound above the other side's number is firm; nothing else is. What filled the peak of
    an unfinished step says nothing, for that peak was still to come.
    """
    found = list(metrics)
    for side, runs in (("A", a), ("B", b)):
        ending = _ending(runs)
        if ending is not None:
            found = [_bound(metric, side, ending) for metric in found]
    return tuple(found)


def _ending(runs: Sequence[Run]) -> str | None:
    """Return where a side's launches ended when their numbers are lower bounds, else None."""
    if any(run.manifest.status == "completed" for run in runs):
        return None
    failure = runs[0].manifest.failure
    out_of_memory = failure is not None and failure.kind == "device_oom"
    if not out_of_memory and any(steady_steps(series) for run in runs for series in run.ranks):
        return None
    if failure is None or failure.step is None:
        return _NOWHERE
    phase = "" if failure.phase is None else f"{failure.phase} of "
    return f"{phase}step {failure.step} was over"


def _bound(metric: Metric, side: str, ending: str) -> Metric:
    if metric.unit not in ("bytes", "count") or metric.a is None or metric.b is None:
        return metric
    if metric.phase in _SET_UP and ending != _NOWHERE:
        return metric
    of_the_peak = metric.category is not None and metric.phase is None
    if metric.verdict == _EXCEEDS[side] and not of_the_peak:
        return metric
    warning = f"{side} ended before {ending}: its number is a lower bound"
    warnings = (*metric.warnings, warning)
    return replace(metric, verdict="unclear", warnings=warnings, capped=True)
