"""A sweep of estimates as a picture: what fills each variant's peak, and what the GPU holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.estimate import Estimate, StepEstimate
from fsdp_doctor.report.document import printable
from fsdp_doctor.report.palette import category_color, category_order
from fsdp_doctor.report.words import words

SUFFIXES = (".png", ".svg")
_GIB = 1 << 30
_WIDTH = 0.62
_MARGIN = 1.12


def check_plot_path(path: Path) -> None:
    """Raise InputError for a file of another kind, or in a folder that is not there."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path.name} is neither .png nor .svg", where="--plot")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is no folder", where="--plot")


def save_sweep_plot(rows: Sequence[tuple[str, Estimate]], name: str, path: Path) -> None:
    """Draw one bar for each variant (label, estimate), stacked by category at its peak.

    The diamond is the predicted peak of reserved memory; the lines are the room for it: the GPU's
    memory less what lies outside torch's allocator, at its low and its high end.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": name}):
        figure = Figure(figsize=(max(6.0, 2.8 + 1.1 * len(rows)), 4.6), layout="constrained")
        axes = figure.add_subplot()
        _paint(axes, rows, name)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def _paint(axes: Any, rows: Sequence[tuple[str, Estimate]], name: str) -> None:
    steps = [_largest(estimate) for _, estimate in rows]
    places = range(len(rows))
    bottoms = [0.0] * len(rows)
    for category in sorted({c for step in steps for c in step.categories}, key=category_order):
        heights = [step.categories.get(category, 0) / _GIB for step in steps]
        axes.bar(
            places,
            heights,
            _WIDTH,
            bottom=bottoms,
            color=category_color(category),
            label=words(category),
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    reserved = [step.peak_reserved_bytes / _GIB for step in steps]
    axes.plot(places, reserved, "D", color="black", markersize=5, label="peak reserved")
    highest = max([*reserved, *bottoms]) * _MARGIN
    for index, (low, high) in enumerate(sorted({_room(estimate) for _, estimate in rows})):
        if high < 3 * highest:
            highest = max(highest, high * _MARGIN)
        for level, style, text in ((high, "-", "room at most"), (low, "--", "room at least")):
            label = text if index == 0 else None
            axes.axhline(level, color="firebrick", linewidth=1.2, linestyle=style, label=label)
    axes.set_ylim(0, highest)
    axes.set_xticks(list(places), [_short(label) for label, _ in rows])
    axes.set_ylabel("GiB at the peak of a steady step")
    axes.set_title(printable(name), loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=8
    )


def _largest(estimate: Estimate) -> StepEstimate:
    return max((rank.steady for rank in estimate.ranks), key=lambda s: s.peak_allocated_bytes)


def _room(estimate: Estimate) -> tuple[float, float]:
    """What torch's allocator may hold, at least and at most, in GiB."""
    low, high = estimate.outside_pytorch_bytes
    return (estimate.memory_bytes - high) / _GIB, (estimate.memory_bytes - low) / _GIB


def _short(label: str) -> str:
    """The field's last part on one line, its value on the next."""
    key, equals, value = printable(label).partition("=")
    return f"{key.rpartition('.')[2]}\n{value}" if equals else key
