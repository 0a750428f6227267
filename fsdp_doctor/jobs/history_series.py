"""The history of a log as the steps of a run.

Which steps stand for what: the first printed step of a process is warm-up (it compiles, allocates
and creates optimizer state), and so is the first after a restart; all others are timed. A warm-up
step's memory counts where no later step's was printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from fsdp_doctor.jobs import timers
from fsdp_doctor.logs.history import History, RankHistory
from fsdp_doctor.model.memory import MemoryCounters, Phase
from fsdp_doctor.model.run import PhaseRecord, RankSeries, StepRecord

Kind = Literal["observed", "warmup", "timed"]


@dataclass(slots=True)
class _Step:
    """What the lines of one step of one rank say."""

    time_s: float | None = None
    allocated: int | None = None
    peak: int | None = None
    reserved: int | None = None
    phases: dict[Phase, float] = field(default_factory=dict)
    """Seconds, where a framework prints them."""

    @property
    def has_memory(self) -> bool:
        return (self.allocated, self.peak, self.reserved) != (None, None, None)


@dataclass(slots=True)
class Series:
    """The ranks of a job, and what a reader of their numbers has to know."""

    ranks: tuple[RankSeries, ...] = ()
    notes: list[str] = field(default_factory=list)


def rank_series(history: History, tokens: float | None = None) -> Series:
    """Turn a history into ranks, as far as lines tell whose they are.

    Lines without a rank are the job's: times go to the last rank (which prints them in Megatron),
    memory counts only where no line tells a rank. ``tokens``: of a step on one GPU, which turn
    tokens/s into step times; None: not known.
    """
    result = Series()
    own = {rank: one for rank, one in history.ranks.items() if rank is not None and one.lines}
    common = history.ranks.get(None)
    steps = {rank: _steps(one, tokens) for rank, one in own.items()}
    starts = [_starts(one) for one in own.values()]
    if common is not None and common.lines:
        shared = _steps(common, tokens)
        starts.append(_starts(common))
        if not steps:
            result.notes.append("no line tells its rank: they are taken for those of rank 0")
            steps[0] = shared
        elif not any(step.time_s is not None for one in steps.values() for step in one.values()):
            last = steps[max(steps)]
            for number, step in shared.items():
                mine = last.setdefault(number, _Step())
                mine.time_s, mine.phases = step.time_s, step.phases
    first = frozenset().union(*starts) if starts else frozenset()
    result.ranks = tuple(
        RankSeries(rank=rank, steps=tuple(_records(steps[rank], first)), finished=True)
        for rank in sorted(steps)
    )
    result.notes += _memory_notes(steps)
    if any(step.phases for one in steps.values() for step in one.values()):
        result.notes.append(timers.NOTE)
    if tokens is None and any(one.rates for one in history.ranks.values()):
        result.notes.append(
            "its lines tell tokens/s, which its config would turn into step times: LOG+CONFIG"
        )
    return result


def _steps(history: RankHistory, tokens: float | None) -> dict[int, _Step]:
    found: dict[int, _Step] = {}
    for number, time_s in zip(history.time_steps, history.times_s, strict=True):
        if number >= 0 and math.isfinite(time_s) and time_s > 0:
            step = found.setdefault(number, _Step())
            step.time_s = max(step.time_s or 0.0, time_s)
    for number, rate in zip(history.rate_steps, history.rates, strict=True):
        if tokens is not None and number >= 0 and math.isfinite(rate) and rate > 0:
            found.setdefault(number, _Step()).time_s = tokens / rate
    for number, phases in timers.phase_times(history).items():
        if number in found:
            found[number].phases = phases
    columns = (history.memory_steps, history.allocated, history.peak, history.reserved)
    for number, allocated, peak, reserved in zip(*columns, strict=True):
        step = found.setdefault(max(int(number), 0), _Step())
        step.allocated = _bytes(allocated, step.allocated)
        step.peak = max(filter(None, (_bytes(peak), step.peak)), default=None)
        step.reserved = max(filter(None, (_bytes(reserved), step.reserved)), default=None)
    return found


def _bytes(value: float, known: int | None = None) -> int | None:
    return round(value) if math.isfinite(value) and value >= 0 else known


def _starts(history: RankHistory) -> frozenset[int]:
    """Return the first printed step, and the first after each restart (the numbers fall back)."""
    for numbers in (history.time_steps, history.memory_steps):
        found = []
        before: int | None = None
        for number in numbers:
            if number < 0:
                continue
            if before is None or number < before - 1:
                found.append(int(number))
            before = int(number)
        if found:
            return frozenset(found)
    return frozenset({0})


def _records(steps: dict[int, _Step], first: frozenset[int]) -> Iterator[StepRecord]:
    for number in sorted(steps):
        step = steps[number]
        kind: Kind = "timed"
        if number in first or number == 0:
            kind = "observed" if step.has_memory else "warmup"
        memory = PhaseRecord(
            step=number,
            phase=Phase.UNKNOWN,
            end=MemoryCounters(allocated_bytes=step.allocated, reserved_bytes=step.reserved),
            peak=MemoryCounters(allocated_bytes=step.peak, reserved_bytes=step.reserved),
        )
        timed = tuple(
            PhaseRecord(step=number, phase=phase, time_s=time_s)
            for phase, time_s in step.phases.items()
        )
        yield StepRecord(
            step=number,
            kind=kind,
            phases=(*timed, memory) if step.has_memory else timed,
            step_time_s=step.time_s,
        )


def _memory_notes(steps: dict[int, dict[int, _Step]]) -> Iterator[str]:
    told = {n for one in steps.values() for n, step in one.items() if step.has_memory}
    timed = {n for one in steps.values() for n, step in one.items() if step.time_s is not None}
    if len(told) == 1 and timed and max(timed) > max(told):
        yield (
            f"memory is printed once, after iteration {max(told)}: "
            "what later iterations needed is not known"
        )
