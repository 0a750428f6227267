"""What a search by re-runs found, as a report."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.bisect import Bisection, BisectPoint, BisectShare
from fsdp_doctor.report.base import DocumentRenderer, renderer_for
from fsdp_doctor.report.document import (
    Block,
    Card,
    Cell,
    Column,
    Document,
    Footnotes,
    Line,
    Prose,
    Section,
    Table,
)
from fsdp_doctor.report.words import LEVEL_MEANINGS, UNKNOWN, format_value, level_text, metric_name
from fsdp_doctor.units import format_seconds


def render_bisection(found: Bisection, fmt: str, **options: Any) -> str:
    """Return the answer in a format. Raises InputError for csv, which has no table for it."""
    if fmt == "json":
        from fsdp_doctor.report.json_format import encode_envelope

        return encode_envelope("bisect", bisection_payload(found), found.warnings) + "\n"
    renderer = renderer_for(fmt, **options)
    if not isinstance(renderer, DocumentRenderer):
        raise InputError(f"bisect has no {fmt} report", hint="terminal, html, markdown or json")
    return renderer.render_document(bisection_document(found))


def bisection_payload(found: Bisection) -> dict[str, Any]:
    """Return the answer as JSON has it; warnings belong to the envelope."""
    return {
        item.name: getattr(found, item.name) for item in fields(found) if item.name != "warnings"
    }


def bisection_document(found: Bisection) -> Document:
    """Return the report: the answer, each field's part, and the points it rests on."""
    notes = Footnotes()
    notes.add_all(found.warnings)
    sections = [Section(title="Answer", blocks=(_answer(found),))]
    if found.shares and found.metric is not None:
        sections.append(Section(title="Which field did it", blocks=_shares(found)))
    sections.append(Section(title="Points", blocks=(_points(found),)))
    return Document(
        title=f"{found.name_a} -> {found.name_b}",
        subtitle="re-run with fields flipped; changes are B - A",
        sections=(*sections, *notes.section()),
    )


def _value(found: Bisection, value: float | None, *, signed: bool = True) -> str:
    return UNKNOWN if found.unit is None else format_value(value, found.unit, signed=signed)


def _answer(found: Bisection) -> Card:
    lines = []
    if found.smallest_set is not None:
        lines.append(Line(label="smallest set", text=_smallest(found)))
    for label, chosen in (
        ("sufficient", [s for s in found.shares if s.sufficient]),
        ("necessary", [s for s in found.shares if s.necessary]),
    ):
        if found.metric is not None:
            text = ", ".join(" + ".join(s.keys) for s in chosen) or "no field alone"
            lines.append(Line(label=label, text=text))
    lines += [
        Line(
            label="together",
            text=f"{' x '.join(i.keys)}: {_value(found, i.value)} beyond the sum of each alone",
        )
        for i in found.interactions
    ]
    levels = [s.level for s in found.shares if s.level is not None]
    if levels:
        level = min(levels)
        lines.append(Line(label="how sure", text=f"{level_text(level)} ({LEVEL_MEANINGS[level]})"))
    cost = f"{found.launches} launches in {format_seconds(found.seconds)}"
    if found.reused:
        cost += f", {found.reused} of earlier calls used again"
    lines.append(Line(label="cost", text=cost))
    return Card(
        title=_claim(found), tone="warn" if found.smallest_set else "plain", lines=tuple(lines)
    )


def _claim(found: Bisection) -> str:
    if found.until is not None:
        word = {"fits": "does not fit", "completes": "does not complete"}[found.until]
        if found.smallest_set is None:
            return f"{found.name_b} {word}; the search has not ended"
        return f"{found.name_b} {word} because of {' and '.join(found.smallest_set)}"
    assert found.metric is not None
    verb = "rose" if (found.delta or 0) > 0 else "fell"
    size = format_value(abs(found.delta or 0), found.unit or "bytes")
    interval = "" if found.interval is None else f" [{_interval(found, found.interval)}]"
    text = f"{metric_name(found.metric)} {verb} by {size}{interval}"
    if found.smallest_set is None:
        return f"{text}; no set of fields is known to explain it"
    return f"{text}; {' and '.join(found.smallest_set)} did it"


def _interval(found: Bisection, interval: tuple[float, float]) -> str:
    return " to ".join(_value(found, end) for end in interval)


def _smallest(found: Bisection) -> str:
    keys = " + ".join(found.smallest_set or ())
    if found.smallest_set_share is None:
        return f"{keys}: without any one of them it does not fail so"
    return f"{keys}: {found.smallest_set_share * 100:.1f} % of the change"


def _shares(found: Bisection) -> tuple[Block, ...]:
    rows = [_share_row(found, share) for share in found.shares]
    blank = Cell(UNKNOWN, "muted")
    rest = found.rest or 0
    percent = f"{rest / found.delta * 100:.1f} %" if found.delta else UNKNOWN
    rows.append(
        (
            Cell("unexplained", "warn" if rest else "muted"),
            Cell(_value(found, rest), "warn" if rest else "muted"),
            Cell(percent),
            *(blank,) * 5,
        )
    )
    table = Table(
        columns=(
            Column("field", "code"),
            Column("change", "number"),
            Column("share", "number"),
            Column("alone in A", "number"),
            Column("missing from B", "number"),
            Column("known by"),
            Column("depends on", "code", only="wide"),
            Column("rests on", only="wide"),
        ),
        rows=tuple(rows),
        caption="Alone in A: is it sufficient? Missing from B: is it necessary?",
    )
    return (table,)


def _share_row(found: Bisection, share: BisectShare) -> tuple[Cell, ...]:
    value = _value(found, share.value)
    if share.interval is not None:
        value += f" [{_interval(found, share.interval)}]"
    return (
        Cell(" + ".join(share.keys)),
        Cell(value, "strong" if share.level else "muted"),
        Cell(UNKNOWN if share.share is None else f"{share.share * 100:.1f} %"),
        Cell(_value(found, share.first_in)),
        Cell(_value(found, share.last_out)),
        Cell(level_text(share.level)),
        Cell(", ".join(share.interacts_with) or UNKNOWN),
        Cell(", ".join(share.rests_on)),
    )


def _points(found: Bisection) -> Block:
    if not found.points:
        return Prose(text="No point was evaluated.", tone="muted")
    return Table(
        columns=(
            Column("point"),
            Column("fields of B", "code"),
            Column("launches", "number"),
            Column("value", "number"),
            Column("upon the spec of A", "code", only="wide"),
            Column("runs", "code", only="wide"),
        ),
        rows=tuple(_point_row(found, point) for point in found.points),
    )


def _point_row(found: Bisection, point: BisectPoint) -> tuple[Cell, ...]:
    outcome = Cell(_value(found, point.value, signed=False))
    if point.failure is not None:
        outcome = Cell(point.failure.splitlines()[0][:120], "warn")
    elif found.metric is None:
        outcome = Cell("holds", "good")
    return (
        Cell(point.id, "strong"),
        Cell("\n".join(point.flipped) or "(none: A)"),
        Cell(str(len(point.runs))),
        outcome,
        Cell("\n".join(point.overrides)),
        Cell("\n".join(point.runs)),
    )
