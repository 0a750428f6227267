"""What a family of progress lines is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdp_doctor.logs.history import History, RankHistory

NAN = float("nan")
_MOST = 10**15
Column: TypeAlias = Sequence[bytes]
Reader: TypeAlias = Callable[[RankHistory, Sequence[Column], History], None]
"""Adds the lines of one rank, given as one column for each group, to its history."""


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of line."""

    name: str
    marker: bytes
    """Stands in every such line; searched first."""
    pattern: re.Pattern[bytes]
    """Begins near the marker and runs to the end of the line; its groups are what is read."""
    read: Reader
    rank_group: int | None = None
    """Group that holds the rank, where the line tells it."""
    by_marker: bool = False
    """Whether lines are found by the marker, because the pattern begins with no fixed text."""

    def matches(self, data: bytes) -> Iterator[re.Match[bytes]]:
        """Yield the matches in a piece of a log."""
        if not self.by_marker:
            yield from self.pattern.finditer(data)
            return
        position = data.find(self.marker)
        while position >= 0:
            start = max(data.rfind(b"\n", 0, position), data.rfind(b"\r", 0, position)) + 1
            found = self.pattern.search(data, start, min(len(data), position + 2000))
            if found is not None:
                yield found
            position = data.find(self.marker, max(position + 1, found.end() if found else 0))


def numbers(column: Column, factor: float = 1.0) -> list[float]:
    """Return a column of numbers, times a factor; what is no number is NaN."""
    try:
        return [value * factor for value in map(float, column)]
    except ValueError:
        return [_number(text) * factor for text in column]


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return NAN


def whole(column: Column) -> list[int]:
    """Return a column of step numbers; absurd ones are -1."""
    try:
        steps = list(map(int, column))
    except ValueError:  # empty, or more digits than Python reads
        steps = []
    if len(steps) == len(column) and max(steps, default=0) < _MOST:
        return steps
    return [int(text) if 0 < len(text) < 16 else -1 for text in column]


def add_times(history: RankHistory, steps: list[int], times: list[float]) -> None:
    """Append step times."""
    history.time_steps.extend(steps)
    history.times_s.extend(times)


def add_memory(
    history: RankHistory,
    steps: list[int],
    *,
    allocated: list[float] | None = None,
    peak: list[float] | None = None,
    reserved: list[float] | None = None,
) -> None:
    """Append memory; columns that a format does not print are NaN."""
    missing = [NAN] * len(steps)
    history.memory_steps.extend(steps)
    history.allocated.extend(allocated or missing)
    history.peak.extend(peak or missing)
    history.reserved.extend(reserved or missing)
