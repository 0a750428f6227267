"""Read a long rank file into columns: one pass of compiled code per kind of record.

All lines are decoded at once; records that are not about steps go to the careful reader. A file
with anything unusual (a torn line, a wrong type, a failure, a phase that comes twice in a
step, times that do not match) is left to the careful reader altogether.
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


class _Phase(_Line, gc=False, tag="phase"):
    step: int
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
_NEWLINE = ord("\n")
_NEGATIVE = b'"step":-'
_APART = frozenset(_OTHERS)
_ANY: Any = Union[(_Phase, _Step, _Begin, _Times, *_OTHERS)]
_DECODER = msgspec.json.Decoder(_ANY)


_CODES = {kind: code for code, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FastRank:
    """What was read of a rank's file."""

    columns: StepColumns
    others: list[tuple[int, bytes]]
    """Line number and text of the records that were not decoded here."""


def read_columns(path: Path, load: Callable[[], tuple[StepRecord, ...]]) -> FastRank | None:
    """Read a rank's file; None when the careful reader has to. ``load`` builds the records."""
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        return None
    try:
        records = _DECODER.decode_lines(data)
        if data.count(b"\n") != len(records):  # blank lines
            return None
        kinds = list(map(type, records))
        phases, steps, begins, times = (
            _of_steps(list(compress(records, map(is_, kinds, repeat(kind)))))
            for kind in (_Phase, _Step, _Begin, _Times)
        )
        columns = _columns(phases, steps, begins, times, load)
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError):
        return None
    return None if columns is None else FastRank(columns=columns, others=_others(data, kinds))


def _of_steps(records: list[Any]) -> list[Any]:
    """Leave out set-up and what lies between steps, which have negative numbers."""
    return [r for r in records if r.step >= 0]


def _others(data: bytes, kinds: list[type]) -> list[tuple[int, bytes]]:
    """Return the lines, with their numbers, that do not go into the columns."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE)
    found = set(compress(range(len(kinds)), map(_APART.__contains__, kinds)))
    position = data.find(_NEGATIVE)
    while position >= 0:
        found.add(int(np.searchsorted(ends, position)))
        position = data.find(_NEGATIVE, position + 1)
    return [(i + 1, data[ends[i - 1] + 1 if i else 0 : ends[i]]) for i in sorted(found)]


def _columns(
    phases: list[_Phase],
    steps: list[_Step],
    begins: list[_Begin],
    times: list[_Times],
    load: Callable[[], tuple[StepRecord, ...]],
) -> StepColumns | None:
    of_phase = _array([line.step for line in phases])
    told = [_array([line.step for line in lines]) for lines in (steps, begins, times)]
    numbers = np.unique(np.concatenate([of_phase, *told]))
    timed = [item for line in times for item in line.phases]
    time_names, time_micro, time_values = zip(*timed, strict=True) if timed else ((), (), ())
    of_time = np.repeat(told[2], _array([len(line.phases) for line in times]))
    phase_names = [line.phase for line in phases]
    names = tuple(dict.fromkeys(phase_names))
    rows = {name: row for row, name in enumerate(names)}
    if not rows.keys() >= set(time_names):
        return None
    shape = (len(names), len(numbers))
    places, time_places = (
        _array(list(map(rows.__getitem__, of))) * len(numbers) + np.searchsorted(numbers, where)
        for of, where in ((phase_names, of_phase), (time_names, of_time))
    )
    keys = _keys(places, [line.microbatch for line in phases])
    time_keys = _keys(time_places, time_micro)
    if not np.array_equal(keys, time_keys) and not np.isin(time_keys, keys).all():
        return None
    if _repeat(keys) or _repeat(time_keys):
        return None
    records, known = (np.bincount(x, minlength=shape[0] * shape[1]) for x in (places, time_places))
    seconds = np.zeros(shape[0] * shape[1])
    if timed:
        weights = np.fromiter(time_values, np.float64, len(time_values))
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
    at_end = np.searchsorted(numbers, of_phase)
    return StepColumns(
        numbers=numbers,
        kinds=kinds,
        step_time_s=step_time_s,
        retries=_placed_ints(len(numbers), at_step, [x.allocation_retries for x in steps]),
        device_used=_placed_ints(len(numbers), at_step, [x.device_used_bytes for x in steps]),
        phases=names,
        present=(records > 0).reshape(shape),
        peak_allocated=_largest(records, places, [x.peak.allocated_bytes for x in phases], shape),
        peak_reserved=_largest(records, places, [x.peak.reserved_bytes for x in phases], shape),
        # of a place that is given several values the last one stays: the last phase of the step
        end_allocated=_placed_ints(len(numbers), at_end, [x.end.allocated_bytes for x in phases]),
        end_reserved=_placed_ints(len(numbers), at_end, [x.end.reserved_bytes for x in phases]),
        time_s=seconds.reshape(shape),
        load=load,
    )


def _array(values: Sequence[int]) -> Ints:
    return np.fromiter(values, np.int64, len(values))


def _keys(places: Ints, microbatches: Sequence[int]) -> Ints:
    """Return one number for each step, phase and micro batch."""
    micro = _array(microbatches)
    most = int(micro.max(initial=0)) + 1
    keys: Ints = places * most + micro
    return keys


def _repeat(keys: Ints) -> bool:
    """Return whether a key comes twice; they mostly rise, which is cheap to see."""
    return bool((np.diff(keys) <= 0).any()) and len(np.unique(keys)) < len(keys)


def _unknown_for_none(values: list[int | None]) -> Ints:
    if None in values:
        return _array([UNKNOWN if value is None else value for value in values])
    return _array(cast("list[int]", values))


def _placed_ints(size: int, where: Ints, values: list[int | None]) -> Ints:
    found = np.full(size, UNKNOWN, np.int64)
    found[where] = _unknown_for_none(values)
    return found


def _largest(records: Ints, places: Ints, values: list[int | None], shape: tuple[int, int]) -> Ints:
    """Return the largest value of each place; ``records``: how many values it has."""
    found = np.full(shape[0] * shape[1], UNKNOWN, np.int64)
    known = _unknown_for_none(values)
    if records.max(initial=0) > 1:
        np.maximum.at(found, places, known)
    else:
        found[places] = known
    return found.reshape(shape)
