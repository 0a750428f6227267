"""A report before it has a format: sections of tables, cards and figures.

``run_document`` and ``comparison_document`` decide what is said; the terminal, Markdown and HTML
renderers decide only how it looks. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Tone = Literal["plain", "good", "bad", "warn", "muted", "strong"]
"""What a text means to the reader; each format has its own colours for it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of a table."""

    text: str
    tone: Tone = "plain"
    notes: tuple[int, ...] = ()
    """Numbers of the footnotes that belong to the value."""
    bar: float | None = None
    """Fraction (0..1) to draw as a bar; only in columns of kind ``bar``."""
    color: str | None = None
    """Category whose colour marks the cell."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    kind: Literal["text", "number", "code", "path", "bar"] = "text"
    """``code``: keys and names, broken at their separators where space is short; ``path``: places
    in source code, which lose their beginning there."""
    only: Literal["narrow", "wide"] | None = None
    """``narrow``: shown in the terminal alone; ``wide``: everywhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under columns."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    caption: str = ""
    """What the numbers are, in one or two sentences."""

    def visible(self, width: Literal["narrow", "wide"]) -> list[int]:
        """Return the indexes of the columns that a narrow or a wide format shows."""
        return [i for i, c in enumerate(self.columns) if c.only in (None, width)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names and their values, one a line."""

    items: tuple[tuple[str, Cell], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prose:
    """A paragraph."""

    text: str
    tone: Tone = "plain"
    only: Literal["narrow"] | None = None
    """``narrow``: for the terminal alone, which has fewer columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A labelled line of a card."""

    label: str
    text: str
    code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A finding or a failure."""

    title: str
    tone: Tone = "plain"
    badges: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotFigure:
    """A plot; only formats that have pictures draw it."""

    title: str
    draw: Callable[[], str]
    """Returns an ``<svg>`` element with all text escaped."""
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """Numbered footnotes, starting at 1."""

    items: tuple[str, ...]


Block = Table | Facts | Prose | Card | PlotFigure | Notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]
    level: Literal[1, 2] = 1
    """2: part of the section before it."""
    collapsed: bool = False
    """Whether a format that can fold starts with it folded."""
    only: Literal["wide"] | None = None
    """``wide``: too long for the terminal, which only says that it exists."""

    def shown(self, width: Literal["narrow", "wide"], *, plots: bool) -> list[Block]:
        """Return the blocks that a narrow or wide format, with or without plots, shows."""
        return [
            block
            for block in self.blocks
            if plots or not isinstance(block, PlotFigure)
            if not (isinstance(block, Prose) and block.only not in (None, width))
        ]


@dataclass(frozen=True, slots=True)
class Tile:
    """A number that a reader looks for first."""

    label: str
    value: str
    detail: str = ""
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str = ""
    badge: Cell | None = None
    tiles: tuple[Tile, ...] = ()
    """Said again in the sections; only formats with room show them."""
    sections: tuple[Section, ...] = ()


@dataclass(slots=True)
class Footnotes:
    """Collects footnotes while a document is built; equal texts share a number."""

    items: list[str] = field(default_factory=list)

    def add(self, text: str) -> int:
        """Return the number of the footnote ``text``."""
        if text not in self.items:
            self.items.append(text)
        return self.items.index(text) + 1

    def add_all(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        """Return the numbers of several footnotes."""
        return tuple(self.add(text) for text in texts)

    def section(self) -> tuple[Section, ...]:
        """Return the closing section, or nothing when there are no notes."""
        if not self.items:
            return ()
        return (Section(title="Notes", blocks=(Notes(items=tuple(self.items)),)),)


def printable(text: str) -> str:
    """Return ``text`` with control characters and lone surrogates shown as escapes.

    A recorded name must not be able to move a terminal's cursor or break an output encoding.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
