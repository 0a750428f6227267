"""B ran out of memory: what did it hold, and ask for, that A did not at the same point?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_doctor.attribution.attribute import Split, attribute_split
from fsdp_doctor.attribution.observations import fullest_rank
from fsdp_doctor.model.comparison import Attribution, Metric
from fsdp_doctor.model.config import ConfigChange
from fsdp_doctor.model.memory import PhaseAnatomy
from fsdp_doctor.model.run import Failure, RankSeries, Run
from fsdp_doctor.runs.summary import peak, steady_peak_bytes

METRIC = "out_of_memory_bytes"
"""Bytes alive in the phase in which B failed, and those it asked for; of A its peak there."""
REQUEST = "request"
"""Stands for a category: what the failing request would have held is not known."""
_MAY = 0
Categories = Mapping[str | None, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """The failing moment of B beside the same point in A."""

    name: str
    failure: Failure
    metric: Metric
    rows: tuple[Attribution, ...]
    moments: str
    """Which steps are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """A rank in the failing phase: bytes in all, and by category as far as known."""

    rank: int
    total: int
    step: int
    """Of ``total``."""
    part: PhaseAnatomy | None
    observed: int | None
    """Step of ``part``."""


def out_of_memory(
    a: Sequence[Run], b: Sequence[Run], changes: Sequence[ConfigChange]
) -> OutOfMemory | None:
    """Compare the failing moment of the first launch of B that ran out of memory with A.

    None when there is none, when A ran out of memory too, or when either side's bytes in that
    phase are not known.
    """
    failed = next((run for run in b if _failure(run) is not None), None)
    failure = None if failed is None else _failure(failed)
    if failed is None or failure is None or any(_failure(run) is not None for run in a):
        return None
    held = _held(failed, failure)
    before = None if held is None else _before(a, failure, held)
    if held is None or before is None:
        return None
    metric, moments = _metric(failure, before, held), _moments(before, held)
    sides = _divided(before, held)
    divided = Split(
        metric=metric,
        a=sides[0],
        b={**sides[1], REQUEST: failure.requested_bytes or 0},
        phases=(str(failure.phase),),
    )
    rows = [_may(row, moments) for row in attribute_split(divided, changes)]
    return OutOfMemory(
        name=failed.manifest.name,
        failure=failure,
        metric=metric,
        rows=tuple(rows),
        moments=moments,
    )


def _failure(run: Run) -> Failure | None:
    failure = run.manifest.failure
    known = failure is not None and failure.kind == "device_oom" and failure.phase is not None
    return failure if known else None


def _rank(run: Run, rank: int | None) -> RankSeries | None:
    return next((s for s in run.ranks if s.rank == rank), None) or fullest_rank(run)


def _held(run: Run, failure: Failure) -> _Moment | None:
    """Return what the failing rank held: in the failing step, else the most known of the phase."""
    series = _rank(run, failure.rank)
    if series is None or failure.step is None:
        return None
    part, observed = _observed(series, failure)
    total, step = _step_peak(series, failure, failure.step), failure.step
    if part is not None and observed is not None and (observed == step or total is None):
        total, step = part.peak_allocated_bytes, observed
    if total is None:
        return None
    return _Moment(rank=series.rank, total=total, step=step, part=part, observed=observed)


def _before(a: Sequence[Run], failure: Failure, held: _Moment) -> _Moment | None:
    """Return A's peak in the phase: in the same step where it is known, else in a steady one."""
    for run in a:
        series = _rank(run, held.rank)
        if series is None:
            continue
        part, observed = _observed(series, failure)
        total, step = _step_peak(series, failure, held.step), held.step
        if total is None:
            total, step = steady_peak_bytes(series, failure.phase), observed or held.step
        if total is not None:
            return _Moment(rank=series.rank, total=total, step=step, part=part, observed=observed)
    return None


def _observed(series: RankSeries, failure: Failure) -> tuple[PhaseAnatomy | None, int | None]:
    """Return the anatomy of the failing phase and its step, where categories are known."""
    if series.anatomy is None:
        return None, None
    part = series.anatomy.phases.get(str(failure.phase))
    return (part, series.anatomy.step) if part is not None and part.categories else (None, None)


def _step_peak(series: RankSeries, failure: Failure, step: int) -> int | None:
    steps = (s.phases for s in series.steps if s.step == step)
    records = series.setup if step < 0 else next(steps, ())
    return peak([p.peak for p in records if p.phase == failure.phase], "allocated_bytes")


def _divided(before: _Moment, held: _Moment) -> tuple[Categories, Categories]:
    """Return the categories where both sides know them, else the bytes as a whole."""
    if before.part is None or held.part is None:
        return {None: before.total}, {None: held.total}
    return _keyed(before.part), _keyed(held.part)


def _keyed(part: PhaseAnatomy) -> dict[str | None, int]:
    return {str(category): size for category, size in part.categories.items()}


def _metric(failure: Failure, before: _Moment, held: _Moment) -> Metric:
    value = held.total + (failure.requested_bytes or 0)
    phase = str(failure.phase)
    return Metric(
        name=METRIC,
        unit="bytes",
        better="lower",
        rank=held.rank,
        phase=phase,
        category=None,
        a=before.total,
        b=value,
        delta=value - before.total,
        relative=value / before.total - 1 if before.total else None,
        verdict="unclear",
        warnings=(
            f"B ended before {phase} of step {failure.step} was over: its number is a lower bound",
        ),
    )


def _moments(before: _Moment, held: _Moment) -> str:
    text = f"bytes of A's step {before.step} and B's step {held.step}"
    if before.observed is None or held.observed is None:
        return f"{text}; categories are not known on both sides"
    return f"{text}, categories of A's step {before.observed} and B's step {held.observed}"


def _may(row: Attribution, moments: str) -> Attribution:
    """Return the row as what it is: at an unfinished moment a field may have done it, no more."""
    if row.category == REQUEST:
        return replace(row, evidence="what B asked for when it failed")
    if row.category is None and not row.keys:
        return replace(row, evidence=f"{moments}: this is what their sums differ by")
    if not row.keys and row.value < 0:
        amount = row.evidence.partition(": ")[0]
        return replace(row, evidence=f"{amount}: B failed before it held as much as A")
    return row if row.level is None else replace(row, level=_MAY)
