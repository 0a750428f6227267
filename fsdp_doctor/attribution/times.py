"""Step times of runs: the job's step is as long as its slowest rank's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fsdp_doctor.attribution.warmup import FEW_STEPS, assess
from fsdp_doctor.model.run import RankSeries, Run, StepRecord

if TYPE_CHECKING:
    from fsdp_doctor.attribution.statistics import FloatArray

BREAKDOWN_PARTS = ("kernel", "exposed_communication", "communication", "copy", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimes:
    """The times of one launch, seconds, over the steps that stand for steady state."""

    step: FloatArray
    """The job's steps in order; empty: no timed steps."""
    phases: dict[str, FloatArray] = field(default_factory=dict)
    """Per phase: time of the slowest rank in each step, summed over micro steps."""
    breakdown: dict[tuple[str, str], float] = field(default_factory=dict)
    """(phase, part) -> seconds of the slowest rank in the profiled step."""
    dropped: int = 0
    """Timed steps left out as warm-up."""
    retried: int = 0
    """Timed steps left out because the allocator had to free its cache and try again."""
    drift: float = 0.0
    """Drift (log) over the steps, 0.0 when steady."""

    @property
    def few(self) -> bool:
        """Whether there are fewer steps than a median should stand on."""
        return self.dropped + self.step.size < FEW_STEPS


def launch_times(run: Run) -> LaunchTimes:
    """Read the times of a launch; of a crashed one those of the steps that all its ranks ended."""
    per_rank = [steps for series in run.ranks if (steps := _timed(series))]
    breakdown = _breakdown(run.ranks)
    if not per_rank:
        return LaunchTimes(step=np.empty(0), breakdown=breakdown)
    numbers = sorted(set.intersection(*(set(steps) for steps in per_rank)))
    retried = _retried(run.ranks) & set(numbers)
    if 2 * len(retried) >= len(numbers):
        retried = set()  # retries are how this job runs, not an accident
    numbers = [n for n in numbers if n not in retried]
    step = np.array([max(steps[n].step_time_s or 0.0 for steps in per_rank) for n in numbers])
    state = assess(np.log(step))
    kept = numbers[state.dropped :]
    return LaunchTimes(
        step=step[state.dropped :],
        phases=_phases(per_rank, kept),
        breakdown=breakdown,
        dropped=state.dropped,
        retried=len(retried),
        drift=state.drift,
    )


def _timed(series: RankSeries) -> dict[int, StepRecord]:
    return {
        s.step: s
        for s in series.steps
        if s.kind == "timed" and s.step_time_s is not None and s.step_time_s > 0
    }


def _retried(ranks: Iterable[RankSeries]) -> set[int]:
    """Return the steps in which some rank's count of allocation retries rose."""
    found = set()
    for series in ranks:
        before: int | None = None
        for step in series.steps:
            count = step.allocation_retries
            if count is not None and before is not None and count > before:
                found.add(step.step)
            before = count if count is not None else before
    return found


def phase_seconds(step: StepRecord) -> dict[str, float]:
    """Return the seconds of each phase of a step, summed over micro steps, where all are known."""
    sums: dict[str, float] = {}
    unknown = set()
    for record in step.phases:
        name = str(record.phase)
        if record.time_s is None:
            unknown.add(name)
        else:
            sums[name] = sums.get(name, 0.0) + record.time_s
    return {name: value for name, value in sums.items() if name not in unknown}


def _phases(per_rank: Sequence[dict[int, StepRecord]], kept: list[int]) -> dict[str, FloatArray]:
    values: dict[str, list[float]] = {}
    for number in kept:
        of_ranks = [phase_seconds(steps[number]) for steps in per_rank]
        for name in set.intersection(*(set(phases) for phases in of_ranks)):
            values.setdefault(name, []).append(max(phases[name] for phases in of_ranks))
    return {name: np.array(series) for name, series in sorted(values.items())}


def _breakdown(ranks: Iterable[RankSeries]) -> dict[tuple[str, str], float]:
    slowest: dict[tuple[str, str], float] = {}
    for series in ranks:
        own: dict[tuple[str, str], float] = {}
        for item in series.time_breakdown:
            for part in BREAKDOWN_PARTS:
                key = (str(item.phase), part)
                own[key] = own.get(key, 0.0) + float(getattr(item, f"{part}_s"))
        for key, value in own.items():
            slowest[key] = max(slowest.get(key, 0.0), value)
    return slowest
