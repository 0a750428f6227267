"""Plots as inline SVG: reproducible, without scripts, in the reader's light or dark colours.

Every function returns one ``<svg>`` element; text in it is escaped by matplotlib. matplotlib is
imported when the first plot is drawn (``report.svg``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.model.memory import Anatomy
from fsdp_doctor.model.run import Run, TimeBreakdown
from fsdp_doctor.report import facts
from fsdp_doctor.report.document import printable
from fsdp_doctor.report.palette import (
    SIDE_COLORS,
    TIME_COLORS,
    category_color,
    category_order,
)
from fsdp_doctor.report.svg import GRID, INK, draw_svg
from fsdp_doctor.report.words import words
from fsdp_doctor.units import format_bytes, format_seconds

ROW_HEIGHT = 0.3
"""Inches of a horizontal bar."""


def side_names(comparison: Comparison) -> tuple[str, str]:
    """Return the names of both sides as plots show them."""
    return f"A: {shortened(comparison.name_a)}", f"B: {shortened(comparison.name_b)}"


def shortened(name: str, length: int = 36) -> str:
    """Return a name on one line, its middle left out where it is long."""
    flat = " ".join(printable(name).split())
    if len(flat) <= length:
        return flat
    half = (length - 1) // 2
    return f"{flat[:half]}…{flat[-half:]}"


def _label(name: str) -> str:
    """Return an identifier as words, safe and short."""
    return shortened(words(name))


def phase_categories(sides: Sequence[tuple[str, Anatomy]]) -> str:
    """Draw the peak of each phase, stacked by category; one bar per side and phase."""
    phases = facts.ordered_phases({p for _, anatomy in sides for p in anatomy.phases})
    rows = [
        (" · ".join(part for part in (_label(phase), side) if part), anatomy.phases[phase])
        for phase in phases
        for side, anatomy in sides
        if phase in anatomy.phases
    ]
    names = sorted(
        {c for _, row in rows for c, b in row.categories.items() if b}, key=category_order
    )
    scale, unit = byte_scale(max((row.peak_allocated_bytes for _, row in rows), default=0))

    def paint(axes: Any) -> None:
        for category in names:
            lefts = [_before(row.categories, category, names) / scale for _, row in rows]
            sizes = [row.categories.get(category, 0) / scale for _, row in rows]
            color = category_color(category)
            axes.barh(range(len(rows)), sizes, left=lefts, color=color, label=_label(category))
        for index, (_, row) in enumerate(rows):
            end = sum(row.categories.values()) / scale
            axes.annotate(
                format_bytes(row.peak_allocated_bytes),
                (end, index),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=INK,
            )
        _bar_axes(axes, [label for label, _ in rows], f"allocated ({unit})")
        _legend_below(axes, columns=4)

    legend_rows = (len(names) + 3) // 4
    return draw_svg(paint, height=0.9 + ROW_HEIGHT * len(rows) + 0.25 * legend_rows, key="phases")


def rank_peaks(sides: Sequence[tuple[str, Run]]) -> str:
    """Draw the allocated and reserved peak of every rank."""
    series = [(name, sorted(run.ranks, key=lambda s: s.rank)) for name, run in sides]
    known = [facts.peak_bytes(s, c) or 0 for _, ranks in series for s in ranks for c in _COUNTERS]
    scale, unit = byte_scale(max(known, default=0))

    def paint(axes: Any) -> None:
        for index, (name, ranks) in enumerate(series):
            for counter, marker, filled in (
                ("allocated_bytes", "o", 1),
                ("reserved_bytes", "s", 0),
            ):
                points = [(s.rank, v) for s in ranks if (v := facts.peak_bytes(s, counter))]
                if not points:
                    continue
                color = SIDE_COLORS[index % len(SIDE_COLORS)]
                what = counter.removesuffix("_bytes")
                axes.plot(
                    [rank for rank, _ in points],
                    [value / scale for _, value in points],
                    marker,
                    color=color,
                    markerfacecolor=color if filled else "none",
                    markersize=5,
                    label=" · ".join(part for part in (shortened(name), what) if part),
                )
        axes.margins(x=0.08)
        axes.set_ylim(0, max(max(known, default=0) / scale * 1.12, 1e-9))
        axes.set_xlabel("rank")
        axes.set_ylabel(f"peak ({unit})")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y", color=GRID)
        _legend_below(axes, columns=2)

    return draw_svg(paint, height=2.9 + 0.2 * len(series), key="ranks")


_COUNTERS = ("allocated_bytes", "reserved_bytes")


def step_times(sides: Sequence[tuple[str, Sequence[Run]]]) -> str:
    """Draw the slowest rank's time of every timed step, one line per launch."""

    def paint(axes: Any) -> None:
        for index, (name, runs) in enumerate(sides):
            color = SIDE_COLORS[index % len(SIDE_COLORS)]
            for launch, run in enumerate(runs):
                times = facts.step_times(run)
                steps = sorted(times)
                axes.plot(
                    steps,
                    [max(times[s].values()) * factor for s in steps],
                    "o-",
                    color=color,
                    markersize=3.5,
                    linewidth=1.1,
                    alpha=0.85,
                    label=shortened(name) if name and not launch else None,
                )
        axes.set_xlabel("step")
        axes.set_ylabel(f"slowest rank ({unit})")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y", color=GRID)
        _room_around(axes)
        if any(name for name, _ in sides):
            _legend_below(axes, columns=2)

    known = [t for _, runs in sides for run in runs for t in _slowest(run)]
    factor, unit = (1e3, "ms") if max(known, default=0.0) < 1 else (1.0, "s")
    return draw_svg(paint, height=2.7, key="steps")


def _slowest(run: Run) -> list[float]:
    return [time_s for time_s, _ in facts.slowest(facts.step_times(run))]


def _room_around(axes: Any) -> None:
    """Widen the time axis so that noise does not look like a cliff: at least 10 % of its top."""
    low, high = axes.get_ylim()
    if high - low < 0.1 * high:
        middle = (low + high) / 2
        axes.set_ylim(middle - 0.05 * high, middle + 0.05 * high)


def time_breakdown(items: Sequence[TimeBreakdown]) -> str:
    """Draw what the device did in each phase of the profiled step."""
    values: list[tuple[str, Callable[[TimeBreakdown], float]]] = [
        ("kernels", lambda t: t.kernel_s),
        ("exposed communication", lambda t: t.exposed_communication_s),
        ("copies", lambda t: t.copy_s),
        ("idle", lambda t: t.idle_s),
    ]

    def paint(axes: Any) -> None:
        lefts = [0.0] * len(items)
        for name, value in values:
            sizes = [value(item) * 1e3 for item in items]
            axes.barh(range(len(items)), sizes, left=lefts, color=TIME_COLORS[name], label=name)
            lefts = [left + s for left, s in zip(lefts, sizes, strict=True)]
        for index, item in enumerate(items):
            axes.annotate(
                format_seconds(item.wall_s),
                (lefts[index], index),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=INK,
            )
        _bar_axes(axes, [_label(item.phase) for item in items], "time (ms)")
        _legend_below(axes, columns=4)

    return draw_svg(paint, height=1.1 + ROW_HEIGHT * len(items), key="breakdown")


def waterfall(a: dict[str, int], b: dict[str, int], *, names: tuple[str, str]) -> str:
    """Draw how the categories lead from A's total to B's."""
    deltas = [(c, b.get(c, 0) - a.get(c, 0)) for c in {**a, **b}]
    moved = sorted(((c, d) for c, d in deltas if d), key=lambda pair: (-pair[1], pair[0]))
    total_a, total_b = sum(a.values()), sum(b.values())
    scale, unit = byte_scale(max(total_a, total_b))
    labels = [names[0], *(_label(c) for c, _ in moved), names[1]]

    def paint(axes: Any) -> None:
        axes.barh(0, total_a / scale, color=SIDE_COLORS[0])
        axes.barh(len(labels) - 1, total_b / scale, color=SIDE_COLORS[1])
        reached = total_a
        _mark(axes, total_a / scale, 0, format_bytes(total_a))
        _mark(axes, total_b / scale, len(labels) - 1, format_bytes(total_b))
        for index, (category, delta) in enumerate(moved, 1):
            axes.barh(index, delta / scale, left=reached / scale, color=category_color(category))
            axes.plot([reached / scale] * 2, [index - 1, index], color=INK, linewidth=0.6)
            right = max(reached, reached + delta) / scale
            _mark(axes, right, index, format_bytes(delta, signed=True))
            reached += delta
        _bar_axes(axes, labels, f"allocated at the peak ({unit})")

    return draw_svg(paint, height=0.8 + ROW_HEIGHT * len(labels), key="waterfall")


def _mark(axes: Any, x: float, y: int, text: str) -> None:
    axes.annotate(
        text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK
    )


def byte_scale(largest: int) -> tuple[int, str]:
    """Return the factor and name of the unit that suits ``largest`` bytes."""
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if largest >= factor:
            return factor, unit
    return 1, "B"


def _before(categories: dict[str, int], category: str, names: list[str]) -> int:
    return sum(categories.get(name, 0) for name in names[: names.index(category)])


def _bar_axes(axes: Any, labels: list[str], unit_label: str) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(unit_label)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)


def _legend_below(axes: Any, *, columns: int) -> None:
    axes.figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
