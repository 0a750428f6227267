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
from fsdp_doctor.attribution.times import common_steps, timed_steps
from fsdp_doctor.model.run import Run
from fsdp_doctor.runs.columns import StepColumns, columns_of

if TYPE_CHECKING:
    from fsdp_doctor.attribution.statistics import FloatArray
    from fsdp_doctor.runs.columns import Ints

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
    late = np.median(own / _peers_median(own) - 1, axis=1)
    if late.max() < LATE:
        return []
    from scipy.special import bdtrc

    slowest = np.argmax(own, axis=0)
    times_last = [int((slowest == r).sum()) for r in range(count)]
    # scipy.stats.binomtest(k, steps, 1 / count, alternative="greater"), which takes 1 s to import
    p_values = [float(bdtrc(k - 1, steps, 1 / count)) if k else 1.0 for k in times_last]
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


def _peers_median(own: FloatArray) -> FloatArray:
    """Return, for each rank and step, the median of the other ranks.

    Equals ``np.median(np.delete(own, rank, axis=0), axis=0)``: without the value at place k of a
    sorted column, place i holds what was at i, or at i + 1 from k on.
    """
    ordered = np.sort(own, axis=0)
    place = np.argsort(np.argsort(own, axis=0, kind="stable"), axis=0, kind="stable")
    middle = ((len(own) - 2) // 2, (len(own) - 1) // 2)
    low, high = (np.where(place > i, ordered[i], ordered[i + 1]) for i in middle)
    peers: FloatArray = (low + high) / 2
    return peers


def _own_by_phases(run: Run) -> tuple[list[int], FloatArray] | None:
    """Return ranks and their own times: the job's step less the wait seen in local phases."""
    phases = LOCAL_PHASES[:1] if _waits_in_optimizer(run) else LOCAL_PHASES
    local = [_local_seconds(columns_of(series), phases) for series in run.ranks]
    if len(local) < 2:
        return None
    known = common_steps([numbers for numbers, _, _ in local])
    if not known.size:
        return None
    at = [np.searchsorted(numbers, known) for numbers, _, _ in local]
    matrix = np.array([seconds[i] for (_, seconds, _), i in zip(local, at, strict=True)])
    step_times = np.max([whole[i] for (_, _, whole), i in zip(local, at, strict=True)], axis=0)
    wait = matrix.max(axis=0) - matrix
    return [series.rank for series in run.ranks], step_times - wait


def _waits_in_optimizer(run: Run) -> bool:
    """Return whether gradients are clipped, or scaled with a check for overflow, across ranks."""
    fields = run.manifest.effective_config.items()
    return any(
        ("grad_norm" in key and field.value is not None) or ("grad_scaler" in key and field.value)
        for key, field in fields
    )


def _local_seconds(
    columns: StepColumns, phases: Sequence[str]
) -> tuple[Ints, FloatArray, FloatArray]:
    """Return the timed steps that know a local phase, their seconds in those, and in all."""
    rows = [row for row, name in enumerate(columns.phases) if name in phases]
    times = columns.time_s[rows]
    kept = timed_steps(columns) & ~np.isnan(times).all(axis=0)
    return columns.numbers[kept], np.nansum(times[:, kept], axis=0), columns.step_time_s[kept]


def _own_by_profile(run: Run) -> tuple[list[int], FloatArray] | None:
    """Return ranks and their own time in the profiled step: one column."""
    own = [
        sum(item.wall_s - item.exposed_communication_s for item in series.time_breakdown)
        for series in run.ranks
    ]
    if len(own) < 2 or min(own) <= 0.0:
        return None
    return [series.rank for series in run.ranks], np.array(own)[:, np.newaxis]
