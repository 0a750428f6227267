"""The columns of traces whose rows of events were read without the unpickler. Needs numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_doctor.memory.snapshot_columns import ASKING, EVENT_COLUMNS, Reader
from fsdp_doctor.memory.snapshot_shorten import Events, Run, different
from fsdp_doctor.memory.snapshot_walk import UnfitError

Ints = npt.NDArray[Any]


class MergingReader(Reader):
    """Reads traces of dicts and of runs of ``events``."""

    kinds = frozenset({dict, Run})

    def __init__(self, events: Events) -> None:
        super().__init__()
        self.events = events
        self._placed: set[Run] = set()
        columns, objects = events.columns, events.objects
        self._numbered = {
            **{name: columns[name] for name in ("addr", "size", "time")},
            "stream": _streams(columns["stream"], self.stream),
            "pool": _codes(columns["pool"], objects, self.pool),
            "action": _codes(columns["action"], objects, self.actions.__getitem__),
        }

    def check(self) -> None:
        """Raise UnfitError where a run is in no trace: something else has taken its events."""
        if len(self._placed) != len(self.events.runs):
            raise UnfitError("events outside of traces")

    def has_time(self, trace: list[Any]) -> bool:
        """Whether events have a time."""
        runs = bool(trace) and type(trace[0]) is Run
        return self.events.has_time if runs else super().has_time(trace)

    def trace(self, index: int, trace: list[Any]) -> None:
        """One device's events."""
        plain, plain_at, runs = self._split(trace)
        columns = self.new_columns()
        frames = [one for chunk in self.fill(columns, plain) for one in chunk]
        merged: dict[str, npt.NDArray[Any]] = {}
        for name, code in EVENT_COLUMNS.items():
            if name != "stack":
                merged[name] = _placed(len(trace), plain_at, np.frombuffer(columns[name], code))
                _fill(merged[name], runs, self._numbered[name])
        # lists of frames by number: those of the events, then one for each dict that has any
        asking = np.frombuffer(ASKING, np.bool_)[merged["action"]]
        own = np.full(len(plain), -1, np.int32)
        own[asking[plain_at]] = len(self.events.objects) + np.arange(len(frames))
        lists = _placed(len(trace), plain_at, own)
        _fill(lists, runs, self.events.columns["frames"])
        merged["stack"] = self._stacks(lists[asking], [*self.events.objects, *frames])
        for name, code in EVENT_COLUMNS.items():
            self.arrays.append((f"trace/{index}/{name}", code, merged[name]))

    def _split(self, trace: list[Any]) -> tuple[list[Any], list[int], list[tuple[int, Run]]]:
        """Dicts, their places, and runs with theirs."""
        plain, plain_at, runs = [], [], []
        at = 0
        while at < len(trace):
            entry = trace[at]
            if type(entry) is Run:
                whole = trace[at : at + entry.count].count(entry) == entry.count
                if not whole or entry in self._placed:
                    raise UnfitError("not all events of a run are there")
                self._placed.add(entry)
                runs.append((at, entry))
                at += entry.count
            else:
                plain.append(entry)
                plain_at.append(at)
                at += 1
        return plain, plain_at, runs

    def _stacks(self, lists: Ints, objects: list[Any]) -> npt.NDArray[np.int32]:
        """Numbers of stacks, which count in order of appearance."""
        count = len(lists)
        first = np.full(len(objects) + 1, count)
        first[lists[::-1]] = np.arange(count)[::-1]  # of equal ones the last assignment stays
        table = np.full(len(objects) + 1, -1, np.int32)  # the last one is of no frames, -1
        seen = np.flatnonzero(first[:-1] < count)
        for one in seen[np.argsort(first[seen])].tolist():
            table[one] = self.stacks.number(objects[one])
        return table[lists]


def _placed(count: int, at: list[int], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """So many values, of which some are known."""
    found = np.empty(count, values.dtype)
    found[at] = values
    return found


def _fill(into: npt.NDArray[Any], runs: list[tuple[int, Run]], values: Ints) -> None:
    for at, run in runs:
        into[at : at + run.count] = values[run.first : run.first + run.count]


def _codes(indexes: Ints, objects: list[Any], number: Callable[[Any], int]) -> Ints:
    """The number of each object that is meant; asked once for each that differs."""
    table = np.zeros(len(objects), np.int32)
    for index in different(indexes).tolist():
        table[index] = number(objects[index])
    return table[indexes]


def _streams(values: Ints, number: Callable[[int], int]) -> Ints:
    """The number of each stream."""
    if (values == values[0]).all():
        return np.full(len(values), number(int(values[0])), np.int32)
    known, index = np.unique(values, return_inverse=True)
    return np.array([number(one) for one in known.tolist()], np.int32)[index.reshape(-1)]
