"""Step times of runs: the job's step is as long as its slowest rank's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from fsdp_doctor.attribution.warmup import FEW_STEPS, assess
from fsdp_doctor.model.run import RankSeries, Run
from fsdp_doctor.runs.columns import StepColumns, columns_of

if TYPE_CHECKING:
    from fsdp_doctor.attribution.statistics import FloatArray
    from fsdp_doctor.runs.columns import Flags, Ints

EXPOSED = "exposed_communication_s"
"""Metric of what a whole step waits for communication."""
BREAKDOWN_PARTS = ("kernel", "exposed_communication", "communication", "copy", "idle")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimes:
    """The times of one launch, seconds, over the steps that stand for steady state."""

    step: FloatArray
    """The job's steps in order; empty: no timed steps."""
    kept: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Their numbers."""
    phases: dict[str, FloatArray] = field(default_factory=dict)
    """Per phase: time of the slowest rank in each step, summed over micro steps."""
    breakdown: dict[tuple[str, str], float] = field(default_factory=dict)
    """(phase, part) -> seconds of the slowest rank in the profiled step."""
    exposed: float | None = None
    """Seconds of exposed communication in the whole profiled step, of the rank with the most."""
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
    per_rank = [columns for s in run.ranks if timed_steps(columns := columns_of(s)).any()]
    breakdown = _breakdown(run.ranks)
    exposed = max(exposed_communication(run).values(), default=None)
    if not per_rank:
        return LaunchTimes(step=np.empty(0), breakdown=breakdown, exposed=exposed)
    numbers = common_steps([c.numbers[timed_steps(c)] for c in per_rank])
    retried = np.intersect1d(_retried(run.ranks), numbers)
    if 2 * len(retried) >= len(numbers):
        retried = retried[:0]  # retries are how this job runs, not an accident
    numbers = numbers[~np.isin(numbers, retried)]
    step = np.max([c.step_time_s[steps_at(c, numbers)] for c in per_rank], axis=0)
    state = assess(np.log(step))
    return LaunchTimes(
        step=step[state.dropped :],
        kept=numbers[state.dropped :],
        phases=_phases(per_rank, numbers[state.dropped :]),
        breakdown=breakdown,
        exposed=exposed,
        dropped=state.dropped,
        retried=len(retried),
        drift=state.drift,
    )


def timed_steps(columns: StepColumns) -> Flags:
    """Return which steps of a rank are timed and know their time."""
    found: Flags = columns.of_kind("timed") & (columns.step_time_s > 0)
    return found


def common_steps(numbers: Sequence[Ints]) -> Ints:
    """Return the step numbers that all of some sorted lists hold."""
    first, *others = numbers
    if all(np.array_equal(first, other) for other in others):
        return first
    return reduce(np.intersect1d, others, first)


def steps_at(columns: StepColumns, numbers: Ints) -> Ints:
    """Return where the steps of these numbers lie; every one is there."""
    found: Ints = np.searchsorted(columns.numbers, numbers)
    return found


def _retried(ranks: Iterable[RankSeries]) -> Ints:
    """Return the steps in which some rank's count of allocation retries rose."""
    found = [np.empty(0, dtype=np.int64)]
    for series in ranks:
        columns = columns_of(series)
        known = columns.retries >= 0
        rose = np.diff(columns.retries[known]) > 0
        found.append(columns.numbers[known][1:][rose])
    return np.unique(np.concatenate(found))


def _phases(per_rank: Sequence[StepColumns], kept: Ints) -> dict[str, FloatArray]:
    """Return the slowest rank's time of each phase, of the steps in which all ranks know it."""
    values = {}
    for name in sorted(set.intersection(*(set(columns.phases) for columns in per_rank))):
        times = np.array([c.time_s[c.phases.index(name), steps_at(c, kept)] for c in per_rank])
        slowest = times.max(axis=0)  # NaN where a rank does not know its own
        if (known := ~np.isnan(slowest)).any():
            values[name] = slowest[known]
    return values


def exposed_communication(run: Run) -> dict[int, float]:
    """Return rank -> seconds of exposed communication in its profiled step, all phases together.

    Nothing of a rank that ran alone: there was nobody to wait for.
    """
    if run.manifest.source == "one_rank":
        return {}
    return {
        series.rank: sum(item.exposed_communication_s for item in series.time_breakdown)
        for series in run.ranks
        if series.time_breakdown
    }


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
