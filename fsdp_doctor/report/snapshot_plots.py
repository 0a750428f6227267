"""The timeline of a snapshot as stacked categories. See ``plots``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from fsdp_doctor.model.snapshot import Timeline
from fsdp_doctor.report.palette import category_color, category_order
from fsdp_doctor.report.plots import byte_scale
from fsdp_doctor.report.svg import GRID, INK, draw_svg
from fsdp_doctor.report.words import words

MAX_PHASE_LABELS = 12


def timeline(data: Timeline, mark: str, key: str = "timeline") -> str:
    """Draw the categories over time, reserved memory above them, and the moment of interest.

    Where time stands still for most of the window (a pause, a compilation) the events are
    numbered instead.
    """
    names = sorted(data.categories, key=category_order)
    tops = [max(data.reserved_bytes, default=0), max(data.active_bytes, default=0)]
    scale, unit = byte_scale(max(tops))
    xs, x_label = _axis(data)

    def paint(axes: Any) -> None:
        axes.stackplot(
            xs,
            [[size / scale for size in data.categories[name]] for name in names],
            colors=[category_color(name) for name in names],
            labels=[words(name) for name in names],
            step="post",
            linewidth=0,
        )
        reserved = [size / scale for size in data.reserved_bytes]
        axes.step(xs, reserved, where="post", color=INK, linewidth=1.0, label="reserved")
        axes.set_xlim(xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1)
        axes.set_ylim(0, max(max(tops) / scale * 1.1, 1e-9))
        axes.set_xlabel(x_label)
        axes.set_ylabel(f"memory ({unit})")
        axes.grid(axis="y", color=GRID)
        axes.set_axisbelow(True)
        _mark(axes, data, xs, mark)
        _phases(axes, data, xs)
        axes.figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)

    return draw_svg(paint, height=3.4 + 0.2 * (len(names) // 4 + 1), key=key)


def _axis(data: Timeline) -> tuple[list[float], str]:
    times = data.times_s
    if times is not None and len(times) > 1:
        whole = times[-1] - times[0]
        pauses = sum(sorted(b - a for a, b in pairwise(times))[-5:])
        if whole > 0 and pauses < 0.5 * whole:
            return list(times), "seconds after the first event"
    return [float(position) for position in data.positions], "events of the allocator"


def _mark(axes: Any, data: Timeline, xs: list[float], mark: str) -> None:
    if data.marked is None or data.marked >= len(xs):
        return
    x = xs[data.marked]
    axes.axvline(x, color=INK, linewidth=0.8, linestyle="--")
    axes.annotate(
        mark,
        (x, 1.0),
        (0, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color=INK,
    )


def _phases(axes: Any, data: Timeline, xs: list[float]) -> None:
    """Name the phases at the bottom, where they are few enough to read."""
    if len(data.phases) > MAX_PHASE_LABELS:
        return
    for low, high, step, phase in data.phases:
        axes.axvline(xs[low], color=GRID, linewidth=0.6)
        if (xs[high] - xs[low]) < 0.06 * (xs[-1] - xs[0]):
            continue
        axes.annotate(
            words(phase) + (f" {step}" if step >= 0 else ""),
            ((xs[low] + xs[high]) / 2, 0.0),
            (0, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color=INK,
        )
