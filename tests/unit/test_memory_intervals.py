"""Interval arithmetic against sets of integers."""

# ruff: noqa: D103 - the names say it

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fsdp_doctor.profiler.observe.intervals import Interval, clip, length, subtract, union

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def points(intervals: list[Interval]) -> set[int]:
    return {p for start, end in intervals for p in range(start, end)}


@given(INTERVALS)
def test_union(intervals: list[Interval]) -> None:
    merged = union(intervals)
    assert points(merged) == points(intervals)
    assert length(merged) == len(points(intervals))
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@given(INTERVALS, INTERVALS)
def test_subtract(intervals: list[Interval], holes: list[Interval]) -> None:
    left = subtract(union(intervals), union(holes))
    assert points(left) == points(intervals) - points(holes)
    assert length(left) == len(points(left))


@given(INTERVALS, st.integers(0, 40), st.integers(0, 40))
def test_clip(intervals: list[Interval], start: int, end: int) -> None:
    assert points(clip(union(intervals), start, end)) == points(intervals) & set(range(start, end))
