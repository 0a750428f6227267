"""Is one rank slower than its peers? Then no flag made the job slow.

A rank's own time is the step less what it waited for the others. It is read from phases in which
ranks do not wait (data; the optimizer unless it clips or scales gradients across ranks), and, with
several launches, from the profiled steps (wall less exposed communication).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fsdp_doctor.attribution.statistics import ALPHA, benjamini_hochberg
from fsdp_doctor.attribution.times import phase_seconds
from fsdp_doctor.model.run import RankSeries, Run

if TYPE_CHECKING:
    from fsdp_doctor.attribution.statistics import FloatArray

LATE = 0.03
"""Share of the peers' time by which a straggler is late (median over the steps)."""
LOCAL_PHASES = ("data", "optimizer")
"""Phases without collectives; the optimizer has some when it clips or scales gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that is last more often than chance and late by enough to matter."""

    rank: int
    last: int
    """Steps (or profiled steps) in which it was the slowest."""
    steps: int
    late: float
    """Median of its own time over the median of its peers' (the rank itself left out), less 1."""
    p: float
    """Binomial test of being last once in R steps, adjusted (Benjamini-Hochberg) over ranks."""
    lost: float
    """Share of the step time that all ranks lose to the slowest rank of each step."""
    basis: str
    """Where the own times come from: ``phases`` or ``profiled``."""


def find_stragglers(runs: Sequence[Run]) -> list[Straggler]:
    """Return the stragglers of a side's launches, most late first; none when not measurable."""
    for basis, matrices in (
        ("phases", [_own_by_phases(run) for run in runs]),
        ("profiled", [_own_by_profile(run) for run in runs]),
    ):
        usable = [m for m in matrices if m is not None]
        ranks = [m[0] for m in usable]
        if not usable or any(other != ranks[0] for other in ranks):
            continue
        own = np.concatenate([m[1] for m in usable], axis=1)
        if found := flag(own, ranks=ranks[0], basis=basis):
            return found
    return []


def flag(own: FloatArray, *, ranks: Sequence[int], basis: str = "phases") -> list[Straggler]:
    """Flag stragglers in a matrix of own times, seconds, rank x step.

    Both must hold: last more often than 1/R of the steps (one-sided binomial test), and late by
    LATE. The first alone gives 3-11 % false alarms, simulated.
    """
    count, steps = own.shape
    if count < 2 or steps == 0:
        return []
    late = np.array(
        [np.median(own[r] / np.median(np.delete(own, r, axis=0), axis=0) - 1) for r in range(count)]
    )
    if late.max() < LATE:
        return []
    from scipy.stats import binomtest

    slowest = np.argmax(own, axis=0)
    times_last = [int((slowest == r).sum()) for r in range(count)]
    p_values = [
        float(binomtest(k, steps, 1 / count, alternative="greater").pvalue) for k in times_last
    ]
    adjusted = benjamini_hochberg(p_values)
    lost = float((own.max(axis=0) - np.median(own, axis=0)).sum() / own.max(axis=0).sum())
    found = [
        Straggler(
            rank=ranks[r],
            last=times_last[r],
            steps=steps,
            late=float(late[r]),
            p=adjusted[r],
            lost=lost,
            basis=basis,
        )
        for r in range(count)
        if adjusted[r] < ALPHA and late[r] >= LATE
    ]
    return sorted(found, key=lambda s: -s.late)


def _own_by_phases(run: Run) -> tuple[list[int], FloatArray] | None:
    """Return ranks and their own times: the job's step less the wait seen in local phases."""
    phases = LOCAL_PHASES[:1] if _waits_in_optimizer(run) else LOCAL_PHASES
    local = [_local_seconds(series, phases) for series in run.ranks]
    known = sorted(set.intersection(*(set(x) for x in local))) if local else []
    if len(local) < 2 or not known:
        return None
    matrix = np.array([[x[step][0] for step in known] for x in local])
    step_times = np.array([[x[step][1] for step in known] for x in local]).max(axis=0)
    wait = matrix.max(axis=0) - matrix
    return [series.rank for series in run.ranks], step_times - wait


def _waits_in_optimizer(run: Run) -> bool:
    """Return whether gradients are clipped, or scaled with a check for overflow, across ranks."""
    fields = run.manifest.effective_config.items()
    return any(
        ("grad_norm" in key and field.value is not None) or ("grad_scaler" in key and field.value)
        for key, field in fields
    )


def _local_seconds(series: RankSeries, phases: Sequence[str]) -> dict[int, tuple[float, float]]:
    """Return step -> (seconds in the local phases, seconds of the step) of the timed steps."""
    found = {}
    for step in series.steps:
        if step.kind != "timed" or not step.step_time_s:
            continue
        seconds = phase_seconds(step)
        values = [seconds[phase] for phase in phases if phase in seconds]
        if values:
            found[step.step] = (sum(values), step.step_time_s)
    return found


def _own_by_profile(run: Run) -> tuple[list[int], FloatArray] | None:
    """Return ranks and their own time in the profiled step: one column."""
    own = [
        sum(item.wall_s - item.exposed_communication_s for item in series.time_breakdown)
        for series in run.ranks
    ]
    if len(own) < 2 or min(own) <= 0.0:
        return None
    return [series.rank for series in run.ranks], np.array(own)[:, np.newaxis]
