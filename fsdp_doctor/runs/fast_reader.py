"""Read a long rank file into columns: one pass of compiled code per kind of record.

All lines are decoded at once, and of phases, which are most, only what differs from those before;
records that are not about steps go to the careful reader. A file with anything unusual (a torn
line, a wrong type, a failure, a phase that comes twice in a step, times that do not match) is left
to the careful reader altogether.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union, cast

import msgspec
import numpy as np

from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import StepRecord
from fsdp_doctor.runs.columns import KINDS, UNKNOWN, StepColumns

if TYPE_CHECKING:
    from fsdp_doctor.runs.columns import Ints

_Name: Any = Literal[tuple(str(phase) for phase in Phase)]
"""Plain strings: those of an enumeration are slow to look up."""
_Kind = Literal["observed", "warmup", "timed", "checkpoint", "kernel_profile"]


class _Line(msgspec.Struct, gc=False, tag_field="record"):
    """A record; of those that are not about steps only the kind is looked at."""


class _Counters(msgspec.Struct, gc=False, frozen=True):
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


class _Tail(msgspec.Struct, gc=False):
    """A phase's record from its second field on."""

    phase: _Name
    end: _Counters = _Counters()
    peak: _Counters = _Counters()
    microbatch: int = 0


class _Step(_Line, gc=False, tag="step"):
    step: int
    kind: _Kind | None = None
    allocation_retries: int | None = None
    device_used_bytes: int | None = None


class _Begin(_Step, gc=False, tag="begin"):
    pass


class _Times(_Line, gc=False, tag="times"):
    step: int
    step_time_s: float | None = None
    phases: tuple[tuple[_Name, int, float], ...] = ()


_OTHERS = tuple(
    msgspec.defstruct(f"_{name}", [], bases=(_Line,), tag=name, gc=False)
    for name in (
        *("start", "anatomy", "time_breakdown", "warning", "end", "exit", "timed", "checkpoint"),
        *("gradient_norm", "megatron_config"),
    )
)
"""Records that the careful reader takes, or ignores. A failure is not among them."""
_PHASE = b'{"record":"phase","step":'
_ANY: Any = Union[(_Step, _Begin, _Times, *_OTHERS)]
_DECODER = msgspec.json.Decoder(_ANY)
_TAILS = msgspec.json.Decoder(_Tail)


_CODES = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FastRank:
    """What was read of a rank's file."""

    columns: StepColumns
    others: list[tuple[int, bytes]]
    """Line number and text, with its newline, of the records that were not decoded here."""


@dataclass(frozen=True, slots=True)
class _Phases:
    """The phase records of steps, in the order of the file."""

    steps: Ints
    tails: list[_Tail]
    """Different ones, in order of first appearance: in steady state counters repeat."""
    which: Ints
    """Index into ``tails`` of each record."""

    def of_each(self, values: Sequence[int | None]) -> Ints:
        """Return a value of each record, from one of each tail."""
        found: Ints = _unknown_for_none(list(values))[self.which]
        return found


def read_columns(path: Path, load: Callable[[], tuple[StepRecord, ...]]) -> FastRank | None:
    """Read a rank's file; None when the careful reader has to. ``load`` builds the records."""
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        return None
    lines = data.split(b"\n")
    lines.pop()
    of_phase = list(map(bytes.startswith, lines, repeat(_PHASE)))
    numbers = [number for number, is_phase in enumerate(of_phase) if not is_phase]
    rest = [lines[number] for number in numbers]
    try:
        records: list[Any] = _DECODER.decode_lines(b"\n".join(rest))
        if len(records) != len(rest):  # blank lines
            return None
        phases, apart = _read_phases(lines, of_phase)
        kinds = list(map(type, records))
        steps, begins, times = (
            [r for r in compress(records, map(is_, kinds, repeat(kind))) if r.step >= 0]
            for kind in (_Step, _Begin, _Times)
        )
        columns = _columns(phases, steps, begins, times, load)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, ValueError):
        return None
    if columns is None:
        return None
    apart += [
        number
        for number, record in zip(numbers, records, strict=True)
        if getattr(record, "step", -1) < 0  # set-up, what lies between steps, other records
    ]
    return FastRank(columns=columns, others=[(n + 1, lines[n] + b"\n") for n in sorted(apart)])


def _read_phases(lines: list[bytes], of_phase: list[bool]) -> tuple[_Phases, list[int]]:
    """Return the phases of steps, and the numbers of lines of other phases.

    Raises ValueError or msgspec's errors when a line is no record.
    """
    parts = [line[len(_PHASE) :].partition(b",") for line in compress(lines, of_phase)]
    apart = []
    if any(step.startswith(b"-") for step, _, _ in parts):
        places = compress(range(len(lines)), of_phase)
        apart = [n for n, part in zip(places, parts, strict=True) if part[0].startswith(b"-")]
        parts = [part for part in parts if not part[0].startswith(b"-")]
    if not all(step.isdigit() for step, _, _ in parts):
        raise ValueError("a step is no number")
    tails_of = [tail for _, _, tail in parts]
    index = {tail: place for place, tail in enumerate(dict.fromkeys(tails_of))}
    tails = _TAILS.decode_lines(b"\n".join([b"{" + tail for tail in index]))
    if len(tails) != len(index):
        raise ValueError("an empty line")
    phases = _Phases(
        _array([int(step) for step, _, _ in parts]),
        tails,
        _array(list(map(index.__getitem__, tails_of))),
    )
    return phases, apart


def _columns(
    phases: _Phases,
    steps: list[_Step],
    begins: list[_Begin],
    times: list[_Times],
    load: Callable[[], tuple[StepRecord, ...]],
) -> StepColumns | None:
    of_phase, tails = phases.steps, phases.tails
    told = [_array([line.step for line in lines]) for lines in (steps, begins, times)]
    numbers = _without_repeats(np.sort(np.concatenate([_without_repeats(of_phase), *told])))
    names = tuple(dict.fromkeys(tail.phase for tail in tails))
    rows = {name: row for row, name in enumerate(names)}
    time_row = _array([rows.get(name, UNKNOWN) for line in times for name, _, _ in line.phases])
    if (time_row == UNKNOWN).any():
        return None
    of_time = np.repeat(told[2], _array([len(line.phases) for line in times]))
    shape = (len(names), len(numbers))
    at_end = np.searchsorted(numbers, of_phase)
    places = phases.of_each([rows[tail.phase] for tail in tails]) * len(numbers) + at_end
    time_places = time_row * len(numbers) + np.searchsorted(numbers, of_time)
    micro = phases.of_each([tail.microbatch for tail in tails])
    time_micros = _array([number for line in times for _, number, _ in line.phases])
    most = 1 + max(int(micro.max(initial=0)), int(time_micros.max(initial=0)))
    keys, time_keys = places * most + micro, time_places * most + time_micros
    if not np.array_equal(keys, time_keys) and not np.isin(time_keys, keys).all():
        return None
    if _repeat(keys) or _repeat(time_keys):
        return None
    records, known = (np.bincount(x, minlength=shape[0] * shape[1]) for x in (places, time_places))
    seconds = np.zeros(shape[0] * shape[1])
    if time_places.size:
        weights = np.array([value for line in times for _, _, value in line.phases])
        seconds += np.bincount(time_places, weights, len(seconds))
    seconds[(records == 0) | (known != records)] = np.nan
    kinds = np.full(len(numbers), KINDS.index("warmup"), np.int8)
    for lines in (begins, steps):
        of_kind = [line for line in lines if line.kind is not None]
        where = np.searchsorted(numbers, _array([line.step for line in of_kind]))
        kinds[where] = [_CODES[line.kind] for line in of_kind if line.kind]
    with_time = [line for line in times if line.step_time_s is not None]
    at_time, at_step = (
        np.searchsorted(numbers, _array([line.step for line in lines]))
        for lines in (with_time, steps)
    )
    step_time_s = np.full(len(numbers), np.nan)
    step_time_s[at_time] = [line.step_time_s for line in with_time]
    return StepColumns(
        numbers=numbers,
        kinds=kinds,
        step_time_s=step_time_s,
        retries=_placed_ints(len(numbers), at_step, [x.allocation_retries for x in steps]),
        device_used=_placed_ints(len(numbers), at_step, [x.device_used_bytes for x in steps]),
        phases=names,
        present=(records > 0).reshape(shape),
        peak_allocated=_largest(
            records, places, phases.of_each([x.peak.allocated_bytes for x in tails]), shape
        ),
        peak_reserved=_largest(
            records, places, phases.of_each([x.peak.reserved_bytes for x in tails]), shape
        ),
        # of a place that is given several values the last one stays: the last phase of the step
        end_allocated=_placed(
            len(numbers), at_end, phases.of_each([x.end.allocated_bytes for x in tails])
        ),
        end_reserved=_placed(
            len(numbers), at_end, phases.of_each([x.end.reserved_bytes for x in tails])
        ),
        time_s=seconds.reshape(shape),
        load=load,
    )


def _array(values: Sequence[int]) -> Ints:
    return np.fromiter(values, np.int64, len(values))


def _without_repeats(values: Ints) -> Ints:
    """Leave out what equals the value before it; all are 0 or more."""
    found: Ints = values[np.diff(values, prepend=UNKNOWN) != 0]
    return found


def _repeat(keys: Ints) -> bool:
    """Return whether a key comes twice."""
    ordered = np.sort(keys)
    return bool((ordered[1:] == ordered[:-1]).any())


def _unknown_for_none(values: list[int | None]) -> Ints:
    if None in values:
        return _array([UNKNOWN if value is None else value for value in values])
    return _array(cast("list[int]", values))


def _placed_ints(size: int, where: Ints, values: list[int | None]) -> Ints:
    return _placed(size, where, _unknown_for_none(values))


def _placed(size: int, where: Ints, values: Ints) -> Ints:
    found = np.full(size, UNKNOWN, np.int64)
    found[where] = values
    return found


def _largest(records: Ints, places: Ints, values: Ints, shape: tuple[int, int]) -> Ints:
    """Return the largest value of each place; ``records``: how many values it has."""
    found = np.full(shape[0] * shape[1], UNKNOWN, np.int64)
    if records.max(initial=0) > 1:
        np.maximum.at(found, places, values)
    else:
        found[places] = values
    return found.reshape(shape)
