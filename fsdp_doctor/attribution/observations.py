"""Numbers of memory read off one launch, each with its place and its range over the steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import RankSeries, Run
from fsdp_doctor.runs.columns import UNKNOWN, StepColumns, columns_of

if TYPE_CHECKING:
    from fsdp_doctor.runs.columns import Flags, Ints

VARYING = frozenset({"peak_reserved_bytes", "outside_pytorch_bytes"})
"""Numbers that differ between identical runs: the pool depends on timing, the device on others."""


class Place(NamedTuple):
    """Which number: a metric's name, rank (None: over all), phase and category."""

    name: str
    rank: int | None
    phase: str | None = None
    category: str | None = None


class Observed(NamedTuple):
    """The number of one launch and the range in which its steps lie."""

    value: int
    low: int
    high: int


Observations = dict[Place, Observed]


def observe(run: Run) -> Observations:
    """Read all memory numbers of a launch, per rank and over all ranks.

    What was not recorded has no entry. Over all ranks the largest counts; the categories over
    all ranks are those of the rank with the largest peak, so that they sum to one peak.
    """
    found: Observations = {}
    for series in run.ranks:
        for place, values in _rank_values(series):
            known = found.get(place)
            low, high = min(values), max(values)
            found[place] = (
                Observed(high, low, high)
                if known is None
                else Observed(max(high, known.value), min(low, known.low), max(high, known.high))
            )
    found.update(_over_ranks(found))
    found.update(_categories_over_ranks(run, found))
    return found


def _rank_values(series: RankSeries) -> Iterator[tuple[Place, list[int]]]:
    """Yield each number of a rank with the lowest and highest it has over the steady steps."""
    rank = series.rank
    columns = columns_of(series)
    steady = columns.steady()
    yield from _peaks(series, columns, steady)
    for name, numbers in (
        ("resident_bytes", columns.end_allocated[steady]),
        ("outside_pytorch_bytes", _outside_pytorch(columns)[steady]),
        ("first_step_peak_allocated_bytes", _step_peaks(columns.peak_allocated)[:1]),
    ):
        if values := _bounds(numbers):
            yield Place(name, rank), values
    if values := _bounds(columns.retries):
        yield Place("allocation_retries", rank), values[-1:]
    yield from _categories(series)


def _peaks(
    series: RankSeries, columns: StepColumns, steady: Flags
) -> Iterator[tuple[Place, list[int]]]:
    rank = series.rank
    known = (columns.peak_allocated >= 0) | (columns.peak_reserved >= 0)
    phases = {name: row for row, name in enumerate(columns.phases) if known[row, steady].any()}
    if phases.keys() == {str(Phase.UNKNOWN)}:  # steps whose memory is not divided
        phases = {}
    for name, peaks, counter in (
        ("peak_allocated_bytes", columns.peak_allocated, "allocated_bytes"),
        ("peak_reserved_bytes", columns.peak_reserved, "reserved_bytes"),
    ):
        if values := _bounds(_step_peaks(peaks)[steady]):
            yield Place(name, rank), values
        for phase in sorted(phases):
            if values := _bounds(peaks[phases[phase], steady]):
                yield Place(name, rank, phase), values
        for record in series.setup:
            if values := _known([getattr(record.peak, counter)]):
                yield Place(name, rank, str(record.phase)), values


def _known(values: list[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _bounds(values: Ints) -> list[int]:
    """Return the smallest and largest known value; nothing where none is known."""
    known = values[values >= 0]
    return [int(known.min()), int(known.max())] if known.size else []


def _step_peaks(peaks: Ints) -> Ints:
    """Return the largest peak of each step's phases."""
    if not len(peaks):
        return np.full(peaks.shape[1], UNKNOWN)
    found: Ints = peaks.max(axis=0)
    return found


def _outside_pytorch(columns: StepColumns) -> Ints:
    """Return what ``summary.outside_pytorch_bytes`` does, of every step."""
    used, reserved = columns.device_used, columns.end_reserved
    outside = used - reserved
    known = (used >= 0) & (reserved >= 0) & (outside >= 0)
    found: Ints = np.where(known, outside, UNKNOWN)
    return found


def _categories(series: RankSeries) -> Iterator[tuple[Place, list[int]]]:
    if series.anatomy is None:
        return
    for category, size in series.anatomy.categories.items():
        yield Place("category_bytes", series.rank, None, str(category)), [size]
    for phase, part in series.anatomy.phases.items():
        for category, size in part.categories.items():
            yield Place("category_bytes", series.rank, str(phase), str(category)), [size]


def _over_ranks(found: Observations) -> Observations:
    largest: Observations = {}
    for place, observed in found.items():
        if place.name == "category_bytes":
            continue
        whole = place._replace(rank=None)
        if whole not in largest or observed.value > largest[whole].value:
            largest[whole] = observed
    return largest


def rank_of(run: Run, rank: int) -> RankSeries | None:
    """Return a rank's series, which mostly stands at its own number."""
    if rank < len(run.ranks) and run.ranks[rank].rank == rank:
        return run.ranks[rank]
    return next((series for series in run.ranks if series.rank == rank), None)


def fullest_rank(run: Run, phase: str | None = None) -> RankSeries | None:
    """Return the rank whose observed step peaks highest, in one phase or (None) in all."""

    def peak(series: RankSeries) -> int:
        if series.anatomy is None:
            return -1
        if phase is None:
            return series.anatomy.peak_allocated_bytes
        part = series.anatomy.phases.get(phase)
        return part.peak_allocated_bytes if part else -1

    candidates = [series for series in run.ranks if peak(series) >= 0]
    return max(candidates, key=peak, default=None)


def _categories_over_ranks(run: Run, found: Observations) -> Observations:
    whole: Observations = {}
    for phase in {place.phase for place in found if place.name == "category_bytes"}:
        series = fullest_rank(run, phase)
        if series is None:
            continue
        for place, observed in found.items():
            if place[:3] == ("category_bytes", series.rank, phase):
                whole[place._replace(rank=None)] = observed
    return whole
