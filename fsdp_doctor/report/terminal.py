"""Reports for a terminal, readable at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING

from fsdp_doctor.report.base import DocumentRenderer
from fsdp_doctor.report.document import (
    Block,
    Card,
    Document,
    Facts,
    Line,
    Notes,
    Prose,
    Section,
    Table,
    Tone,
    printable,
)

if TYPE_CHECKING:
    from rich.console import Console

_STYLES: dict[Tone, str] = {
    "plain": "",
    "good": "green",
    "bad": "bold red",
    "warn": "yellow",
    "muted": "dim",
    "strong": "bold",
}


class TerminalRenderer(DocumentRenderer):
    """Text of a fixed width; styles only when asked for, and never with NO_COLOR."""

    file_extension = ".txt"
    is_binary = False

    def __init__(self, *, color: bool = False, width: int = 80) -> None:
        self.color = color
        self.width = max(width, 40)

    def render_document(self, document: Document) -> str:
        """Return the document as text."""
        from rich.console import Console

        stream = StringIO()
        console = Console(
            file=stream,
            width=self.width,
            force_terminal=self.color,
            color_system="standard" if self.color else None,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )
        _Page(console, self.width).document(document)
        lines = stream.getvalue().split("\n")
        return "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"


class _Page:
    """Writes one document to one console."""

    def __init__(self, console: Console, width: int) -> None:
        self.console = console
        self.width = width

    def say(self, text: str = "", style: str = "") -> None:
        self.console.out(text, style=style or None, highlight=False)

    def document(self, document: Document) -> None:
        badge = f"  {document.badge.text}" if document.badge else ""
        for line in self._wrapped(document.title + badge):
            self.say(line, _STYLES[document.badge.tone] if document.badge else "bold")
        for line in self._wrapped(document.subtitle):
            self.say(line, "dim")
        for section in document.sections:
            self.section(section)

    def section(self, section: Section) -> None:
        title = printable(section.title)
        if section.blocks and not section.shown("narrow", plots=False):
            return
        self.say()
        if section.level == 1:
            rule = "─" * max(3, self.width - len(title) - 1)
            self.say(f"{title} {rule}", "bold")
        else:
            self.say(title, "bold underline")
        if section.only is not None:
            self.say("In the HTML, Markdown and JSON reports.", "dim")
            return
        writers: dict[type[Block], Callable[..., None]] = {
            Table: self.table,
            Facts: self.facts,
            Prose: self.prose,
            Card: self.card,
            Notes: self.notes,
        }
        previous: Block | None = None
        for block in section.shown("narrow", plots=False):
            if previous is not None and not isinstance(block, Prose):
                self.say()
            writers[type(block)](block)
            previous = block

    def prose(self, block: Prose) -> None:
        for line in self._wrapped(block.text):
            self.say(line, _STYLES[block.tone])

    def facts(self, block: Facts) -> None:
        from fsdp_doctor.report.layout import marks

        labels = [printable(label).replace("\n", " ") for label, _ in block.items]
        widest = min(max((len(label) for label in labels), default=0), self.width // 2)
        for label, (_, cell) in zip(labels, block.items, strict=True):
            room = max(self.width - widest - 2, 20)
            first, *rest = self._wrapped(cell.text + marks(cell.notes), room) or [""]
            *above, label_end = self._wrapped(label, widest) or [""]
            for line in above:
                self.say(line, "dim")
            self.console.out(label_end.ljust(widest), style="dim", end="  ", highlight=False)
            self.say(first, _STYLES[cell.tone])
            for line in rest:
                self.say(" " * (widest + 2) + line, _STYLES[cell.tone])

    def card(self, block: Card) -> None:
        badges = f"[{', '.join(block.badges)}] " if block.badges else ""
        for text in self._wrapped(badges + block.title):
            self.say(text, _STYLES[block.tone] or "bold")
        widest = max((len(line.label) for line in block.lines), default=0)
        previous = ""
        for line in block.lines:
            label = "" if line.label == previous else line.label
            previous = line.label
            for text in self._card_line(line, self.width - widest - 4):
                self.say(f"  {label.ljust(widest)}  {text}")
                label = ""

    def _card_line(self, line: Line, room: int) -> list[str]:
        if not line.code:
            return self._wrapped(line.text, room)
        return [
            part
            for text in printable(line.text).split("\n")
            for part in wrap(text, room, subsequent_indent="  ", break_on_hyphens=False) or [""]
        ]

    def notes(self, block: Notes) -> None:
        for number, text in enumerate(block.items, 1):
            mark = f"[{number}] "
            for index, line in enumerate(self._wrapped(text, self.width - len(mark))):
                self.say((mark if index == 0 else " " * len(mark)) + line)

    def table(self, block: Table) -> None:
        from rich.cells import cell_len

        from fsdp_doctor.report.layout import fit

        if block.title:
            self.say(printable(block.title), "bold")
        if block.caption:
            for line in self._wrapped(block.caption):
                self.say(line, "dim")
        for index, fitted in enumerate(fit(block, self.width)):
            if index:
                self.say()
            self.say("  ".join(fitted.header), "dim underline" if self.console.color_system else "")
            for row in fitted.rows:
                padding = [" " * cell_len(cell.lines[0]) for cell in row]
                for lines in zip_longest(*(cell.lines for cell in row)):
                    for position, line in enumerate(lines):
                        text = padding[position] if line is None else line
                        style = _STYLES[row[position].cell.tone]
                        end = "\n" if position == len(lines) - 1 else "  "
                        self.console.out(text, style=style or None, end=end, highlight=False)

    def _wrapped(self, text: str, width: int | None = None) -> list[str]:
        lines: list[str] = []
        for line in printable(text).split("\n"):
            lines += wrap(line, width or self.width, break_on_hyphens=False) or (
                [""] if line else []
            )
        return lines
