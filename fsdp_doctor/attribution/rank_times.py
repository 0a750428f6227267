"""Times of single ranks: their steps, phases, throughput and exposed communication.

In a job whose ranks wait for each other all steps last about the same; what differs between ranks
is where in the step they spend it. Steps that count are those of the job (``launch_times``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import TYPE_CHECKING

import numpy as np

from fsdp_doctor.attribution.statistics import CLAIM_FLOOR, TimeTest, benjamini_hochberg, welch
from fsdp_doctor.attribution.sway import job_sway
from fsdp_doctor.attribution.time_rows import (
    adjusted,
    judged,
    throughput_row,
    time_row,
    tokens_per_step,
    without_trifles,
)
from fsdp_doctor.attribution.times import (
    EXPOSED,
    LaunchTimes,
    exposed_communication,
    steps_at,
    timed_steps,
)
from fsdp_doctor.model.comparison import Metric
from fsdp_doctor.model.run import Run
from fsdp_doctor.runs.columns import columns_of

if TYPE_CHECKING:
    from fsdp_doctor.attribution.statistics import FloatArray

Key = tuple[str, str | None]
"""Name of a metric, and phase."""
_STEP: Key = ("step_time_s", None)


def rank_metrics(
    a: Sequence[Run],
    b: Sequence[Run],
    times: tuple[Sequence[LaunchTimes], Sequence[LaunchTimes]],
    step: Metric,
    *,
    band: float,
    notes: tuple[str, ...],
) -> list[Metric]:
    """Compare the times of every rank that both sides know; p-values adjusted over all of them.

    ``step`` is the job's step time. A rank is judged where both sides have several launches;
    of single ones the numbers stand without an interval.
    """
    sides = tuple(
        [_medians(run, launch) for run, launch in zip(runs, of_side, strict=True)]
        for runs, of_side in zip((a, b), times, strict=True)
    )
    steps = tuple(sum(launch.step.size for launch in side) for side in times)
    moved = job_sway(*times)
    work = [tokens_per_step(runs) / runs[0].manifest.world_size for runs in (a, b)]
    parts: list[Metric] = []
    throughputs: list[Metric] = []
    for name, phase in dict.fromkeys(key for side in sides for launch in side for key in launch):
        of_a, of_b = (_by_rank(side, (name, phase)) for side in sides)
        for rank in sorted(of_a.keys() & of_b.keys()):
            seconds = (of_a[rank], of_b[rank])
            counts = tuple(map(len, seconds)) if name == EXPOSED else steps
            row = time_row(
                name, *seconds, rank=rank, phase=phase, n_steps=(counts[0], counts[1]), notes=notes
            )
            test = _test(*seconds, moved=moved)
            if (name, phase) == _STEP and (rate := throughput_row(row, *work)) is not None:
                if test is not None and rate.a and rate.b:
                    rate = judged(rate, test.throughput(work[1] / work[0]), band=band)
                throughputs.append(rate)
            if test is not None:
                row = without_trifles(judged(row, test, band=band), step)
            parts.append(row)
    return [
        *adjusted(parts, benjamini_hochberg),
        *adjusted(throughputs, benjamini_hochberg),  # the step times once more
    ]


def _medians(run: Run, times: LaunchTimes) -> dict[Key, dict[int, float]]:
    """Return, of a launch, each rank's medians over the steps that count, in seconds."""
    found: dict[Key, dict[int, float]] = {}
    known = [(s.rank, columns_of(s)) for s in run.ranks]
    known = [(rank, c) for rank, c in known if times.step.size and timed_steps(c).any()]
    if known:
        ranks, columns = [rank for rank, _ in known], [c for _, c in known]
        places = [steps_at(c, times.kept) for c in columns]
        steps = np.array([c.step_time_s[at] for c, at in zip(columns, places, strict=True)])
        found[_STEP] = dict(zip(ranks, np.median(steps, axis=1).tolist(), strict=True))
        for phase in times.phases:
            seconds = np.array(
                [c.time_s[c.phases.index(phase), at] for c, at in zip(columns, places, strict=True)]
            )
            found["phase_time_s", phase] = _of_ranks(ranks, seconds)
    if exposed := exposed_communication(run):
        found[EXPOSED, None] = exposed
    return found


def _of_ranks(ranks: Sequence[int], seconds: FloatArray) -> dict[int, float]:
    """Return the median of each rank's known times; ranks that know none are left out."""
    unknown = np.isnan(seconds)
    if unknown.any():
        kept = np.flatnonzero(~unknown.all(axis=1))
        ranks = [ranks[place] for place in kept.tolist()]
        return dict(zip(ranks, np.nanmedian(seconds[kept], axis=1).tolist(), strict=True))
    return dict(zip(ranks, np.median(seconds, axis=1).tolist(), strict=True))


def _by_rank(side: Sequence[Mapping[Key, Mapping[int, float]]], key: Key) -> dict[int, list[float]]:
    """Return rank -> one number of each launch that knows it."""
    found: dict[int, list[float]] = {}
    for launch in side:
        for rank, value in launch.get(key, {}).items():
            found.setdefault(rank, []).append(value)
    return found


def _test(a: Sequence[float], b: Sequence[float], *, moved: float) -> TimeTest | None:
    if min(len(a), len(b)) < 2 or min(*a, *b) <= 0.0:
        return None
    return welch([*map(log, a)], [*map(log, b)], floor=CLAIM_FLOOR).widened(moved)
