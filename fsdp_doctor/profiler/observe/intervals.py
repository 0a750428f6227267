"""Arithmetic of time intervals: unions and what one covers of another. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
"""Start and end, in the caller's unit; empty when the end is not after the start."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same points."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def length(disjoint: Iterable[Interval]) -> int:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def clip(disjoint: Iterable[Interval], start: int, end: int) -> list[Interval]:
    """The parts of disjoint intervals that lie between ``start`` and ``end``."""
    return [(max(a, start), min(b, end)) for a, b in disjoint if min(b, end) > max(a, start)]


def subtract(disjoint: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """What of ``disjoint`` is not covered by ``holes``; both disjoint and in order."""
    left: list[Interval] = []
    first = 0
    for start, end in disjoint:
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        at, index = start, first
        while index < len(holes) and holes[index][0] < end:
            if holes[index][0] > at:
                left.append((at, holes[index][0]))
            at = max(at, holes[index][1])
            index += 1
        if at < end:
            left.append((at, end))
    return left
