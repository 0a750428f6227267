"""The steps of one rank as columns: what a comparison needs of them, without an object per record.

512 ranks of 1,000 steps are 4 million phase records; as objects they would take gigabytes and
minutes. ``StepColumns`` stands in ``RankSeries.steps``: it is a sequence of StepRecord like the
tuple it replaces, but builds those only when somebody asks for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

import numpy as np

from fsdp_doctor.model.run import RankSeries, StepRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]

KINDS = ("observed", "warmup", "timed", "checkpoint", "kernel_profile")
"""Step kinds; ``StepColumns.kinds`` holds indexes of it."""
UNKNOWN = -1
"""Stands for None in a column of integers; in one of floats NaN does."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepColumns(Sequence[StepRecord]):
    """One rank's steps in their order; n steps, P phases."""

    numbers: Ints
    """(n) step numbers."""
    kinds: NDArray[np.int8]
    """(n) indexes of KINDS."""
    step_time_s: Floats
    """(n)"""
    retries: Ints
    """(n) cumulative ``num_alloc_retries``."""
    device_used: Ints
    """(n) bytes."""
    phases: tuple[str, ...]
    """(P) names, in order of first appearance."""
    present: Flags
    """(P, n) whether a step has the phase."""
    peak_allocated: Ints
    """(P, n) bytes, the largest over the micro batches of a step."""
    peak_reserved: Ints
    """(P, n) bytes, likewise."""
    end_allocated: Ints
    """(n) bytes at the end of the last phase."""
    end_reserved: Ints
    """(n) bytes, likewise."""
    time_s: Floats
    """(P, n) seconds summed over micro batches; NaN where one of them is not known."""
    load: Callable[[], tuple[StepRecord, ...]]
    """Builds the records."""
    _built: list[tuple[StepRecord, ...]] = field(default_factory=list)

    def records(self) -> tuple[StepRecord, ...]:
        """Return all steps as records; they are built once."""
        if not self._built:
            self._built.append(self.load())
        return self._built[0]

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StepRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        return self.records()[index]

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records())

    def of_kind(self, kind: str) -> Flags:
        """Return which steps are of a kind."""
        found: Flags = self.kinds == KINDS.index(kind)
        return found

    def with_memory(self) -> Flags:
        """Return which steps have memory counters."""
        known = (self.peak_allocated >= 0) | (self.peak_reserved >= 0)
        found: Flags = np.any(known, axis=0)
        return found

    def times(self, kinds: Sequence[str] = ("timed",)) -> dict[int, float]:
        """Return step -> seconds of the steps of these kinds that know their time."""
        known = np.isin(self.kinds, [KINDS.index(kind) for kind in kinds])
        known &= ~np.isnan(self.step_time_s)
        numbers, seconds = self.numbers[known].tolist(), self.step_time_s[known].tolist()
        return dict(zip(numbers, seconds, strict=True))

    def phase_times(self) -> dict[str, dict[int, float]]:
        """Return phase -> timed step -> seconds, where they are known."""
        found = {}
        for name, row in zip(self.phases, self.time_s, strict=True):
            known = self.of_kind("timed") & ~np.isnan(row)
            pairs = zip(self.numbers[known].tolist(), row[known].tolist(), strict=True)
            found[name] = dict(pairs)
        return found

    def steady_peak(self, counter: str, phase: str | None = None) -> int | None:
        """Return the peak of ``allocated_bytes`` or ``reserved_bytes`` over the steady steps, in
        one phase or (None) in all.
        """
        peaks = {"allocated_bytes": self.peak_allocated, "reserved_bytes": self.peak_reserved}
        rows = [i for i, name in enumerate(self.phases) if phase is None or name == phase]
        found = int(peaks[counter][rows][:, self.steady()].max(initial=UNKNOWN))
        return None if found == UNKNOWN else found

    def resident(self, counter: str) -> int | None:
        """Return a counter at the end of the last steady step that has phases."""
        ends = {"allocated_bytes": self.end_allocated, "reserved_bytes": self.end_reserved}
        steady = np.flatnonzero(self.steady() & self.present.any(axis=0))
        found = int(ends[counter][steady[-1]]) if steady.size else UNKNOWN
        return None if found == UNKNOWN else found

    def steady(self) -> Flags:
        """Return which steps stand for steady state (see ``summary.steady_steps``)."""
        memory = self.with_memory()
        timed = self.of_kind("timed") & memory
        if timed.any():
            return timed
        observed = np.flatnonzero(self.of_kind("observed") & memory)
        last = np.zeros(len(self), dtype=bool)
        last[observed[-1:]] = True
        return last


def columns_of(series: RankSeries) -> StepColumns:
    """Return a rank's steps as columns: as they were read, or made from its records."""
    steps = series.steps
    if isinstance(steps, StepColumns):
        return steps
    known = _MADE.get(id(steps))
    if known is None or known[0] is not steps:
        while len(_MADE) >= _MOST_MADE:
            del _MADE[next(iter(_MADE))]
        known = _MADE[id(steps)] = (steps, columns_from(steps))
    return known[1]


_MADE: dict[int, tuple[Sequence[StepRecord], StepColumns]] = {}
"""Columns of the records used last; several questions are asked of each rank."""
_MOST_MADE = 64


def columns_from(steps: Sequence[StepRecord]) -> StepColumns:
    """Turn records into columns."""
    names = tuple(dict.fromkeys(str(p.phase) for step in steps for p in step.phases))
    places = {name: i for i, name in enumerate(names)}
    shape = (len(names), len(steps))
    peaks = {c: np.full(shape, UNKNOWN) for c in ("allocated_bytes", "reserved_bytes")}
    present = np.zeros(shape, dtype=bool)
    time_s = np.zeros(shape)
    for column, step in enumerate(steps):
        for record in step.phases:
            row = places[str(record.phase)]
            present[row, column] = True
            time_s[row, column] += np.nan if record.time_s is None else record.time_s
            for counter, peak in peaks.items():
                value = getattr(record.peak, counter)
                if value is not None and value > peak[row, column]:
                    peak[row, column] = value
    time_s[~present] = np.nan
    ends = [step.phases[-1].end if step.phases else None for step in steps]
    return StepColumns(
        numbers=np.array([step.step for step in steps], dtype=np.int64),
        kinds=np.array([KINDS.index(step.kind) for step in steps], dtype=np.int8),
        step_time_s=_floats([step.step_time_s for step in steps]),
        retries=_ints([step.allocation_retries for step in steps]),
        device_used=_ints([step.device_used_bytes for step in steps]),
        phases=names,
        present=present,
        peak_allocated=peaks["allocated_bytes"],
        peak_reserved=peaks["reserved_bytes"],
        end_allocated=_ints([end.allocated_bytes if end else None for end in ends]),
        end_reserved=_ints([end.reserved_bytes if end else None for end in ends]),
        time_s=time_s,
        load=lambda: tuple(steps),
    )


def _floats(values: list[float | None]) -> Floats:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


def _ints(values: list[int | None]) -> Ints:
    return np.array([UNKNOWN if v is None else v for v in values], dtype=np.int64)
