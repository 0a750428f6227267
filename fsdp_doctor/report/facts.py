"""Numbers of a run that reports show, derived once for all formats. Unknown stays None."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fsdp_doctor.model.memory import Anatomy, Phase
from fsdp_doctor.model.run import PhaseRecord, RankSeries, Run, StepRecord
from fsdp_doctor.runs.summary import (
    columns_read,
    peak,
    resident_bytes,
    steady_peak_bytes,
    steady_steps,
)
from fsdp_doctor.runs.summary import outside_pytorch_bytes as outside_of_step

PHASE_ORDER = {phase.value: index for index, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Memory of one phase of one rank."""

    phase: Phase
    end_bytes: int | None
    """Allocated at the end of the phase, in the last step seen."""
    peak_bytes: int | None
    """Largest allocated, over the steps seen."""
    reserved_bytes: int | None
    """Largest reserved, over the steps seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPhase:
    """Saving or loading a checkpoint on one rank."""

    phase: Phase
    before_bytes: int | None
    """Allocated when the save began: what stays between steps."""
    peak_bytes: int | None
    reserved_bytes: int | None
    host_before_bytes: int | None
    host_peak_bytes: int | None
    time_s: float | None


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and spread of repeated times, in seconds."""

    count: int
    median: float
    p10: float
    p90: float


def first_rank(run: Run) -> RankSeries | None:
    """Return the first recorded rank that has anything to show, the failed one before others."""
    failure = run.manifest.failure
    ranks = sorted(run.ranks, key=lambda s: failure is None or s.rank != failure.rank)
    told = [s for s in ranks if s.steps or s.setup or s.anatomy]
    return next(iter(told or ranks), None)


def memory_steps(series: RankSeries) -> list[StepRecord]:
    """Return the steady steps; for a run that never got there, every step with phases."""
    return steady_steps(series) or [s for s in series.steps if s.phases]


def phase_memory(series: RankSeries) -> list[PhaseMemory]:
    """Return memory per phase: set-up first, then the phases of a step in their order."""
    records: dict[tuple[bool, Phase], list[PhaseRecord]] = {}
    for record in series.setup:
        records.setdefault((True, record.phase), []).append(record)
    for step in memory_steps(series):
        for record in step.phases:
            records.setdefault((False, record.phase), []).append(record)
    return [
        PhaseMemory(
            phase=phase,
            end_bytes=found[-1].end.allocated_bytes,
            peak_bytes=peak([r.peak for r in found], "allocated_bytes"),
            reserved_bytes=peak([r.peak for r in found], "reserved_bytes"),
        )
        for (_, phase), found in records.items()
    ]


def checkpoint_phases(series: RankSeries) -> list[CheckpointPhase]:
    """Return the save and the load that this rank recorded, as far as it came."""
    record = series.checkpoint
    host = {
        Phase.CHECKPOINT_SAVE: record.save_host_peak_bytes if record else None,
        Phase.CHECKPOINT_LOAD: record.load_host_peak_bytes if record else None,
    }
    return [
        CheckpointPhase(
            phase=found.phase,
            before_bytes=resident_bytes(series),
            peak_bytes=found.peak.allocated_bytes,
            reserved_bytes=found.peak.reserved_bytes,
            host_before_bytes=record.host_before_bytes if record else None,
            host_peak_bytes=host[found.phase],
            time_s=found.time_s,
        )
        for step in series.steps
        for found in step.phases
        if found.phase in host
    ]


def spread_over_ranks(
    run: Run, value: Callable[[RankSeries], int | None]
) -> tuple[int, int] | None:
    """Return the smallest and largest known ``value`` over the recorded ranks."""
    known = [v for series in run.ranks if (v := value(series)) is not None]
    return (min(known), max(known)) if known else None


def peak_bytes(series: RankSeries, counter: str = "allocated_bytes") -> int | None:
    """Return the steady peak; for a run that never got there, the largest peak seen."""
    steady = steady_peak_bytes(series, counter=counter)
    if steady is not None:
        return steady
    seen = [p.peak for p in series.setup] + [p.peak for s in series.steps for p in s.phases]
    return peak(seen, counter)


def first_step_peak_bytes(series: RankSeries, counter: str = "allocated_bytes") -> int | None:
    """Return the peak of the first step (the optimizer creates its state there)."""
    return peak([p.peak for p in series.steps[0].phases], counter) if series.steps else None


def unused_reserved_bytes(series: RankSeries) -> int | None:
    """Return reserved minus allocated at the end of the last steady step."""
    reserved = resident_bytes(series, "reserved_bytes")
    allocated = resident_bytes(series)
    return None if reserved is None or allocated is None else reserved - allocated


def outside_pytorch_bytes(series: RankSeries) -> int | None:
    """Return device memory in use beyond what PyTorch reserved, at the end of the last step that
    knows both (context, NCCL, other processes).
    """
    known = (outside_of_step(step) for step in reversed(series.steps))
    return next((outside for outside in known if outside is not None), None)


def unfinished_step(run: Run) -> int | None:
    """Return the step in which the run failed, or None."""
    failure = run.manifest.failure
    return None if failure is None or failure.step is None or failure.step < 0 else failure.step


def last_known(series: RankSeries, name: str) -> int | None:
    """Return a step's field (a cumulative count, say) from the last step that knows it."""
    for step in reversed(series.steps):
        value: int | None = getattr(step, name)
        if value is not None:
            return value
    return None


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Return a quantile of a sorted sequence, interpolated between neighbours."""
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return the spread of the known values, or None when there are none."""
    ordered = sorted(v for v in values if v is not None)
    if not ordered:
        return None
    return Spread(
        count=len(ordered),
        median=median(ordered),
        p10=quantile(ordered, 0.1),
        p90=quantile(ordered, 0.9),
    )


def slowest(times: dict[int, dict[int, float]]) -> list[tuple[float, int]]:
    """Return per step the slowest rank's time and the rank, from step -> rank -> seconds."""
    return [
        max((time_s, rank) for rank, time_s in ranks.items()) for _, ranks in sorted(times.items())
    ]


def step_times(run: Run, kinds: tuple[str, ...] = ("timed",)) -> dict[int, dict[int, float]]:
    """Return step -> rank -> seconds for the steps of these kinds."""
    times: dict[int, dict[int, float]] = {}
    for series in run.ranks:
        for number, seconds in _times_of(series, kinds).items():
            times.setdefault(number, {})[series.rank] = seconds
    return times


def has_step_times(run: Run) -> bool:
    """Return whether a timed step of some rank knows its time."""
    return any(_times_of(series, ("timed",)) for series in run.ranks)


def _times_of(series: RankSeries, kinds: tuple[str, ...]) -> dict[int, float]:
    columns = columns_read(series)
    if columns is not None:
        return columns.times(kinds)
    return {
        step.step: step.step_time_s
        for step in series.steps
        if step.kind in kinds and step.step_time_s is not None
    }


def phase_times(run: Run) -> dict[Phase, dict[int, dict[int, float]]]:
    """Return phase -> timed step -> rank -> seconds, micro steps added up."""
    times: dict[Phase, dict[int, dict[int, float]]] = {}
    for series in run.ranks:
        columns = columns_read(series)
        for name, known in columns.phase_times().items() if columns is not None else ():
            for number, seconds in known.items():
                times.setdefault(Phase(name), {}).setdefault(number, {})[series.rank] = seconds
        for step in series.steps if columns is None else ():
            for record in step.phases if step.kind == "timed" else ():
                if record.time_s is not None:
                    ranks = times.setdefault(record.phase, {}).setdefault(step.step, {})
                    ranks[series.rank] = ranks.get(series.rank, 0.0) + record.time_s
    return times


def most_often_slowest(times: dict[int, dict[int, float]]) -> tuple[int, int] | None:
    """Return the rank that was slowest most often and in how many steps; None for one rank."""
    if max((len(ranks) for ranks in times.values()), default=0) < 2:
        return None
    counts: dict[int, int] = {}
    for _, rank in slowest(times):
        counts[rank] = counts.get(rank, 0) + 1
    rank = min(counts, key=lambda r: (-counts[r], r))
    return rank, counts[rank]


def loss_facts(run: Run) -> tuple[int, int, tuple[int, int] | None]:
    """Return (steps with finite loss, steps with known loss, (step, rank) of the first that is not
    finite).
    """
    known = sorted(
        (step.step, series.rank, step.loss_finite)
        for series in run.ranks
        for step in series.steps
        if step.loss_finite is not None
    )
    bad = [(step, rank) for step, rank, finite in known if not finite]
    return len(known) - len(bad), len(known), bad[0] if bad else None


def anatomy_of(run: Run) -> tuple[int, Anatomy] | None:
    """Return the rank and anatomy to show: of the rank with the largest peak."""
    told = [(series.rank, series.anatomy) for series in run.ranks if series.anatomy]
    return max(told, key=lambda pair: (pair[1].peak_allocated_bytes, -pair[0])) if told else None


def by_size(categories: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return categories with their bytes, largest first, without empty ones."""
    return sorted(
        ((c, b) for c, b in categories.items() if b), key=lambda pair: (-pair[1], pair[0])
    )


def ordered_phases(phases: Iterable[str]) -> list[str]:
    """Return phase names in the order of a training job."""
    return sorted(phases, key=lambda name: (PHASE_ORDER.get(name, len(PHASE_ORDER)), name))
