"""Numbers of memory read off one launch, each with its place and its range over the steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import PhaseRecord, RankSeries, Run, StepRecord
from fsdp_doctor.runs.summary import steady_steps

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
    rank = series.rank
    steps = steady_steps(series)
    phases = {str(p.phase) for step in steps for p in step.phases}
    if phases == {str(Phase.UNKNOWN)}:  # steps that are not divided
        phases = set()
    for name, counter in (
        ("peak_allocated_bytes", "allocated_bytes"),
        ("peak_reserved_bytes", "reserved_bytes"),
    ):
        for phase in (None, *sorted(phases)):
            if values := _peaks(steps, counter, phase):
                yield Place(name, rank, phase), values
        for record in series.setup:
            if values := _known([getattr(record.peak, counter)]):
                yield Place(name, rank, str(record.phase)), values
    if values := _known([_end(step, "allocated_bytes") for step in steps]):
        yield Place("resident_bytes", rank), values
    if values := _known([outside_pytorch_bytes(step) for step in steps]):
        yield Place("outside_pytorch_bytes", rank), values
    if values := _peaks(list(series.steps[:1]), "allocated_bytes", None):
        yield Place("first_step_peak_allocated_bytes", rank), values
    if values := _known([step.allocation_retries for step in series.steps]):
        yield Place("allocation_retries", rank), [max(values)]
    yield from _categories(series)


def _known(values: list[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _peaks(steps: list[StepRecord], counter: str, phase: str | None) -> list[int]:
    """Return the peak of a counter per step, in one phase or (None) in all."""
    peaks = []
    for step in steps:
        values = _known([getattr(p.peak, counter) for p in step.phases if phase in (None, p.phase)])
        if values:
            peaks.append(max(values))
    return peaks


def _last_phase(step: StepRecord) -> PhaseRecord | None:
    return step.phases[-1] if step.phases else None


def _end(step: StepRecord, counter: str) -> int | None:
    last = _last_phase(step)
    value: int | None = getattr(last.end, counter) if last else None
    return value


def outside_pytorch_bytes(step: StepRecord) -> int | None:
    """Return what the device holds beyond PyTorch's pool: context, libraries, other processes.

    None when it is not known, or when the two counters contradict each other.
    """
    reserved = _end(step, "reserved_bytes")
    if step.device_used_bytes is None or reserved is None:
        return None
    outside = step.device_used_bytes - reserved
    return outside if outside >= 0 else None


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
