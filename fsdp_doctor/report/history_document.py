"""What a report says about runs over time: the changes first, then every run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from fsdp_doctor.attribution.run_history import MEMORY_NAMES, Change, Entry
from fsdp_doctor.report.base import DocumentRenderer, renderer_for
from fsdp_doctor.report.document import (
    Block,
    Card,
    Cell,
    Column,
    Document,
    Line,
    Prose,
    Section,
    Table,
    Tone,
    printable,
)
from fsdp_doctor.report.json_format import encode_envelope
from fsdp_doctor.report.words import config_value, format_value, metric_name
from fsdp_doctor.units import format_relative

_COLUMNS = (*MEMORY_NAMES, "step_time_s", "tokens_per_s")
_UNITS = {
    **dict.fromkeys(MEMORY_NAMES, "bytes"),
    "allocation_retries": "count",
    "step_time_s": "s",
    "tokens_per_s": "tokens/s",
}
_NARROW = ("peak_allocated_bytes", "peak_reserved_bytes", "step_time_s")


def render_history(
    entries: Sequence[Entry], changes: Sequence[Change], fmt: str, **options: Any
) -> str:
    """Return the history in a format (terminal, html, markdown, json, csv)."""
    if fmt == "json":
        payload = {
            "runs": [_run_payload(entry) for entry in entries],
            "changes": [_change_payload(change) for change in changes],
        }
        return encode_envelope("log", payload) + "\n"
    if fmt == "csv":
        return _csv(entries, changes)
    renderer = renderer_for(fmt, **options)
    assert isinstance(renderer, DocumentRenderer)
    return renderer.render_document(history_document(entries, changes))


def history_document(entries: Sequence[Entry], changes: Sequence[Change]) -> Document:
    """Return the report of a history."""
    cards: tuple[Block, ...] = tuple(_card(change) for change in changes)
    if not cards:
        cards = (Prose(text="No metric changed for good.", tone="muted"),)
    return Document(
        title=f"{len(entries)} runs over time",
        subtitle="oldest first; * marks a run from which on a metric has a new level",
        sections=(
            Section(title="Changes", blocks=cards),
            Section(title="Runs", blocks=(_table(entries, changes),)),
        ),
    )


def _card(change: Change) -> Card:
    unit = _UNITS[change.metric]
    relative = change.b / change.a - 1 if change.a else None
    tone: Tone = "warn" if change.b > change.a else "good"
    title = (
        f"{metric_name(change.metric)} {format_value(change.a, unit)} -> "
        f"{format_value(change.b, unit)} ({format_relative(relative)}) from "
        f"{change.at.created[:16]} on: {_label(change.at)}"
    )
    lines = [Line(label="before", text=f"{change.before.created[:16]} {_label(change.before)}")]
    if not change.confirmed:
        lines.append(Line(label="so far", text="one run; the next one confirms it or not"))
    if change.p is not None:
        lines.append(Line(label="p", text=f"{change.p:.2g}, adjusted for the places tried"))
    lines += [
        Line(label="field", text=f"{f.key}: {config_value(f.a)} -> {config_value(f.b)}")
        for f in change.fields
    ]
    lines += [
        Line(label="changed", text=f"{name}: {text}")
        for name, text in (change.environment or {}).items()
    ]
    if not change.fields and not change.environment:
        lines.append(Line(label="field", text="none that is recorded changed there"))
    return Card(title=title, tone=tone, lines=tuple(lines))


def _label(entry: Entry) -> str:
    place = entry.directory.name
    return entry.name if place == entry.name else f"{entry.name} ({place})"


def _table(entries: Sequence[Entry], changes: Sequence[Change]) -> Table:
    marked = {(id(change.at), change.metric) for change in changes}
    columns = [Column("made"), Column("run", "code"), Column("n", "number"), Column("status")]
    columns += [
        Column(metric_name(name), "number", only=None if name in _NARROW else "wide")
        for name in _COLUMNS
    ]
    rows = []
    for entry in entries:
        cells = [
            Cell(entry.created[:16].replace("T", " ")),
            Cell(_label(entry)),
            Cell(str(len(entry.launches))),
            Cell(_status(entry)),
        ]
        for name in _COLUMNS:
            text = format_value(entry.values[name], _UNITS[name])
            new = (id(entry), name) in marked
            cells.append(Cell(f"* {text}" if new else text, "strong" if new else "plain"))
        rows.append(tuple(cells))
    return Table(columns=tuple(columns), rows=tuple(rows))


def _status(entry: Entry) -> str:
    statuses = {run.manifest.status for run in entry.launches}
    return statuses.pop() if len(statuses) == 1 else "mixed"


def _run_payload(entry: Entry) -> dict[str, Any]:
    manifest = entry.launches[0].manifest
    return {
        "name": entry.name,
        "directory": printable(str(entry.directory)),
        "created": entry.created,
        "status": _status(entry),
        "launches": len(entry.launches),
        "world_size": manifest.world_size,
        "device": manifest.device_name or manifest.device_type,
        "source": manifest.source,
        "metrics": {name: entry.values[name] for name in _COLUMNS},
    }


def _change_payload(change: Change) -> dict[str, Any]:
    return {
        "metric": change.metric,
        "name": change.at.name,
        "before": printable(str(change.before.directory)),
        "at": printable(str(change.at.directory)),
        "a": change.a,
        "b": change.b,
        "relative": change.b / change.a - 1 if change.a else None,
        "p": change.p,
        "confirmed": change.confirmed,
        "fields": [
            {
                "key": f.key,
                "a": f.a.value if f.a.set else None,
                "b": f.b.value if f.b.set else None,
            }
            for f in change.fields
        ],
        "environment": change.environment or {},
    }


def _csv(entries: Sequence[Entry], changes: Sequence[Change]) -> str:
    """Return one line a run; ``changed`` names the metrics with a new level from there on."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["created", "name", "directory", "status", "launches", *_COLUMNS, "changed"])
    for entry in entries:
        new = " ".join(change.metric for change in changes if change.at is entry)
        numbers = ["" if (v := entry.values[name]) is None else v for name in _COLUMNS]
        texts = [printable(text) for text in (entry.name, str(entry.directory))]
        writer.writerow([entry.created, *texts, _status(entry), len(entry.launches), *numbers, new])
    return stream.getvalue()
