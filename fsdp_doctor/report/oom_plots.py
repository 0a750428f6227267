"""Plots of a post-mortem: memory and step time over the steps, as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_doctor.logs.history import History
from fsdp_doctor.logs.records import Failure
from fsdp_doctor.report.palette import SIDE_COLORS
from fsdp_doctor.report.svg import GRID, draw_svg

MAX_RANKS = 4
MAX_POINTS = 600
_GIB = 1 << 30


def memory_over_steps(history: History, failure: Failure | None) -> str:
    """Draw the memory that ranks printed; the failing one first."""
    series = []
    for rank in _chosen(history, failure):
        one = history.ranks[rank]
        for name in ("allocated", "peak", "reserved"):
            points = _points(one.memory_steps, getattr(one, name), 1 / _GIB)
            if points:
                series.append((f"rank {'?' if rank is None else rank}, {name}", points))
    return _draw(series, "GiB", "oom-memory")


def times_over_steps(history: History) -> str:
    """Draw the step times that ranks printed."""
    series = [
        (f"rank {'?' if rank is None else rank}", points)
        for rank in _chosen(history, None)
        if (points := _points(history.ranks[rank].time_steps, history.ranks[rank].times_s, 1.0))
    ]
    return _draw(series, "s", "oom-times")


def _chosen(history: History, failure: Failure | None) -> list[int | None]:
    ranks = sorted(history.ranks, key=lambda rank: (rank is None, rank or 0))
    if failure is not None and failure.rank in ranks:
        ranks.remove(failure.rank)
        ranks.insert(0, failure.rank)
    return ranks[:MAX_RANKS]


def _points(
    steps: Sequence[int], values: Sequence[float], factor: float
) -> list[tuple[float, float]]:
    rows = [
        (float(step if step >= 0 else index), value * factor)
        for index, (step, value) in enumerate(zip(steps, values, strict=True))
        if value == value and abs(value) < 1e18  # noqa: PLR0124 (NaN)
    ]
    return rows[:: max(1, len(rows) // MAX_POINTS)]


def _draw(series: list[tuple[str, list[tuple[float, float]]]], unit: str, key: str) -> str:
    def paint(axes: Any) -> None:
        for index, (label, points) in enumerate(series):
            xs, ys = zip(*points, strict=True)
            marker = "o" if len(points) < 40 else ""
            color = SIDE_COLORS[index % len(SIDE_COLORS)]
            style = ("-", "--", ":")[(index // len(SIDE_COLORS)) % 3]
            axes.plot(
                xs, ys, linestyle=style, marker=marker, markersize=3, color=color, label=label
            )
        axes.set_xlabel("step")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=GRID)
        if series:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, frameon=False)

    return draw_svg(paint, height=2.8, key=key)
