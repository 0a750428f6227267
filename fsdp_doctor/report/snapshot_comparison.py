"""What a report says about two snapshots."""

from __future__ import annotations

from functools import partial

from fsdp_doctor.model.snapshot import CategoryChange, SnapshotComparison, StackChange
from fsdp_doctor.redact import redact_text
from fsdp_doctor.report import plots, snapshot_plots
from fsdp_doctor.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Footnotes,
    PlotFigure,
    Prose,
    Section,
    Table,
    Tile,
    Tone,
)
from fsdp_doctor.report.snapshot_cards import findings_section, label_of, place_text
from fsdp_doctor.report.words import UNKNOWN, size, words
from fsdp_doctor.units import format_bytes

MAX_STACKS = 15


def comparison_document(comparison: SnapshotComparison) -> Document:
    """Return the report of two snapshots."""
    notes = Footnotes()
    notes.add_all(comparison.warnings)
    a, b = comparison.moment_a, comparison.moment_b
    sections = [
        findings_section(comparison.findings, "Nothing got clearly larger or smaller."),
        Section(title="What is compared", blocks=(_sides(comparison),)),
        Section(title="By category", blocks=_categories(comparison)),
        Section(title="By stack", blocks=_stacks(comparison)),
        *_settings(comparison),
        Section(title="Over time", blocks=_timelines(comparison), collapsed=False),
    ]
    delta = b.allocated_bytes - a.allocated_bytes
    return Document(
        title=f"{label_of(comparison.a)} -> {label_of(comparison.b)}",
        subtitle=f"two memory snapshots at {comparison.aligned}; changes are B - A",
        tiles=(
            Tile("A", format_bytes(a.allocated_bytes)),
            Tile("B", format_bytes(b.allocated_bytes)),
            Tile("B - A", format_bytes(delta, signed=True), tone=_tone(delta)),
        ),
        sections=(*sections, *notes.section()),
    )


def _tone(delta: int) -> Tone:
    return "bad" if delta > 0 else ("good" if delta < 0 else "muted")


def _sides(comparison: SnapshotComparison) -> Table:
    rows = []
    for side, analysis, moment in (
        ("A", comparison.a, comparison.moment_a),
        ("B", comparison.b, comparison.moment_b),
    ):
        rows.append(
            (
                Cell(side, "strong"),
                Cell(redact_text(label_of(analysis))),
                size(moment.allocated_bytes),
                size(moment.reserved_bytes),
                size(analysis.oom.requested_bytes if analysis.oom else None),
                Cell(place_text(moment)),
            )
        )
    return Table(
        columns=(
            Column("side"),
            Column("file", "code"),
            Column("allocated", "number"),
            Column("reserved", "number"),
            Column("refused", "number"),
            Column("moment"),
        ),
        rows=tuple(rows),
        caption=f"Compared: {comparison.aligned}.",
    )


def _categories(comparison: SnapshotComparison) -> tuple[Block, ...]:
    rows = [_category_row(row) for row in comparison.categories]
    total = CategoryChange(
        category="all",
        a_bytes=comparison.moment_a.allocated_bytes,
        b_bytes=comparison.moment_b.allocated_bytes,
        a_start_bytes=None,
        b_start_bytes=None,
    )
    rows.append(_category_row(total))
    table = Table(
        columns=(
            Column("category"),
            Column("A", "number"),
            Column("B", "number"),
            Column("B - A", "number"),
            Column("of it between steps", "number"),
        ),
        rows=tuple(rows),
        caption="The last column is the change of what is there when the step begins.",
    )
    names = ("A", "B")
    a, b = comparison.moment_a.categories, comparison.moment_b.categories
    figure = PlotFigure(
        title="From A to B by category", draw=lambda: plots.waterfall(a, b, names=names)
    )
    return table, figure


def _category_row(row: CategoryChange) -> tuple[Cell, ...]:
    delta = row.b_bytes - row.a_bytes
    start: int | None = None
    if row.a_start_bytes is not None and row.b_start_bytes is not None:
        start = row.b_start_bytes - row.a_start_bytes
    return (
        Cell(words(row.category), "strong" if row.category == "all" else "plain",
             color=None if row.category == "all" else row.category),
        size(row.a_bytes),
        size(row.b_bytes),
        Cell(format_bytes(delta, signed=True), _tone(delta)),
        Cell(UNKNOWN if start is None else format_bytes(start, signed=True)),
    )  # fmt: skip


def _stacks(comparison: SnapshotComparison) -> tuple[Block, ...]:
    if not comparison.stacks:
        return (Prose(text="The same code holds the same bytes.", tone="muted"),)
    table = Table(
        columns=(
            Column("B - A", "number"),
            Column("A", "number"),
            Column("B", "number"),
            Column("blocks", "number"),
            Column("category"),
            Column("stack", "path"),
        ),
        rows=tuple(_stack_row(change) for change in comparison.stacks[:MAX_STACKS]),
        caption="By the code that asked, without line numbers; grown stacks as well as new ones.",
    )
    rest = comparison.stacks[MAX_STACKS:]
    if not rest:
        return (table,)
    total = sum(change.delta_bytes for change in rest)
    text = f"{len(rest)} more stacks changed, by {format_bytes(total, signed=True)} together."
    return table, Prose(text=text, tone="muted")


def _stack_row(change: StackChange) -> tuple[Cell, ...]:
    frames = [redact_text(frame) for frame in change.frames[:3]] or [change.operator or UNKNOWN]
    category = f"{words(change.category)} ({change.what})"
    return (
        Cell(format_bytes(change.delta_bytes, signed=True), _tone(change.delta_bytes)),
        size(change.a_bytes),
        size(change.b_bytes),
        Cell(f"{change.a_count} -> {change.b_count}"),
        Cell(category, color=change.category),
        Cell("\n".join(frames)),
    )


def _settings(comparison: SnapshotComparison) -> list[Section]:
    a, b = comparison.a.settings, comparison.b.settings
    changed = [key for key in sorted({**a, **b}) if a.get(key) != b.get(key)]
    if not changed:
        return []
    rows = tuple(
        (Cell(key), Cell(redact_text(str(a.get(key, UNKNOWN)))),
         Cell(redact_text(str(b.get(key, UNKNOWN)))))
        for key in changed
    )  # fmt: skip
    columns = (Column("setting", "code"), Column("A", "code"), Column("B", "code"))
    return [Section(title="Allocator settings", blocks=(Table(columns=columns, rows=rows),))]


def _timelines(comparison: SnapshotComparison) -> tuple[Block, ...]:
    figures = []
    for side, analysis in (("A", comparison.a), ("B", comparison.b)):
        line = analysis.timeline
        if line is not None:
            mark = "failed" if analysis.oom else "peak"
            draw = partial(snapshot_plots.timeline, line, mark, key=f"timeline-{side}")
            figures.append(PlotFigure(title=f"{side}: memory over time by category", draw=draw))
    return tuple(figures)
