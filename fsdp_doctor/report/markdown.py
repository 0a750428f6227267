"""GitHub-flavoured Markdown, for pull requests and chat."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from fsdp_doctor.report.base import DocumentRenderer
from fsdp_doctor.report.document import (
    Block,
    Card,
    Cell,
    Column,
    Document,
    Facts,
    Line,
    Notes,
    Prose,
    Section,
    Table,
    printable,
)
from fsdp_doctor.report.words import UNKNOWN

_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$&@])")


class MarkdownRenderer(DocumentRenderer):
    """Markdown without pictures; everything recorded is escaped."""

    file_extension = ".md"
    is_binary = False

    def render_document(self, document: Document) -> str:
        """Return the document as Markdown."""
        badge = f" ({escape(document.badge.text)})" if document.badge else ""
        parts = [f"# {escape(document.title)}{badge}"]
        if document.subtitle:
            parts.append(escape(document.subtitle))
        for section in document.sections:
            parts += _section(section)
        return "\n\n".join(parts) + "\n"


def escape(text: str) -> str:
    """Return text that Markdown shows literally, on one line."""
    flat = " ".join(printable(text).split())
    flat = _SPECIAL.sub(r"\\\1", flat)
    # a number or dash at the start would make a list
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", re.sub(r"^([-+=])(?=\s|$)", r"\\\1", flat))


def code(text: str) -> str:
    """Return text as a code span, whatever backticks it has; pipes are safe in tables."""
    flat = " ".join(printable(text).split())
    if not flat:
        return ""
    longest = max((len(run) for run in re.findall(r"`+", flat)), default=0)
    fence = "`" * (longest + 1)
    space = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{space}{flat}{space}{fence}".replace("|", r"\|")


def _section(section: Section) -> list[str]:
    writers: dict[type[Block], Callable[..., list[str]]] = {
        Table: _table,
        Facts: _facts,
        Prose: lambda block: [escape(block.text)],
        Card: _card,
        Notes: _notes,
    }
    title = escape(section.title)
    body = [
        text for block in section.shown("wide", plots=False) for text in writers[type(block)](block)
    ]
    if section.blocks and not body:
        return []
    if section.collapsed:
        return [f"<details><summary>{title}</summary>", *body, "</details>"]
    return [f"{'##' if section.level == 1 else '###'} {title}", *body]


def _table(table: Table) -> list[str]:
    shown = [i for i in table.visible("wide") if table.columns[i].kind != "bar"]
    columns = [table.columns[i] for i in shown]
    lines = [_row([escape(column.title) for column in columns])]
    lines.append(_row(["--:" if column.kind == "number" else "---" for column in columns]))
    lines += [
        _row([_cell(row[i], column) for i, column in zip(shown, columns, strict=True)])
        for row in table.rows
    ]
    before = [f"**{escape(table.title)}**"] if table.title else []
    before += [escape(table.caption)] if table.caption else []
    return [*before, "\n".join(lines)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell, column: Column) -> str:
    if cell.text == UNKNOWN:
        return UNKNOWN + _marks(cell)
    style = code if column.kind in ("code", "path") else escape
    text = "<br>".join(style(line) for line in cell.text.split("\n") if line)
    if cell.tone == "strong" and text:
        text = f"**{text}**"
    return text + _marks(cell)


def _marks(cell: Cell) -> str:
    return "".join(f" \\[{number}\\]" for number in cell.notes)


def _facts(facts: Facts) -> list[str]:
    return [
        "\n".join(f"- {escape(k)}: {escape(cell.text)}{_marks(cell)}" for k, cell in facts.items)
    ]


def _card(card: Card) -> list[str]:
    badges = f" ({escape(', '.join(card.badges))})" if card.badges else ""
    lines = [f"- **{escape(card.title)}**{badges}"]
    lines += [f"  - {_line(line)}" for line in card.lines]
    return ["\n".join(lines)]


def _line(line: Line) -> str:
    if line.code:
        return f"{escape(line.label)}: " + "<br>".join(code(part) for part in line.text.split("\n"))
    return f"{escape(line.label)}: {escape(line.text)}"


def _notes(notes: Notes) -> list[str]:
    return ["\n".join(f"{number}. {escape(text)}" for number, text in enumerate(notes.items, 1))]
