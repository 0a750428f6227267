"""Fit a table into the columns of a terminal. Numbers are never cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich.cells import cell_len, set_cell_size

from fsdp_doctor.report.document import Cell, Column, Table, printable

GAP = 2
BAR_WIDTH = 12
MIN_CODE = 16
MIN_TEXT = 13
"""Fits ``communication``, the longest word of a category."""
_SOFT = ("text", "code", "path")
_BREAKS = re.compile(r"(?<=[._/: -])")
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class FittedCell:
    """A cell's lines, each padded to its column's width."""

    lines: tuple[str, ...]
    cell: Cell


@dataclass(frozen=True, slots=True)
class FittedTable:
    """Headers and rows that fit."""

    header: tuple[str, ...]
    rows: tuple[tuple[FittedCell, ...], ...]


def fit(table: Table, width: int) -> list[FittedTable]:
    """Return the table, or, where its numbers alone are too wide, several with fewer columns."""
    shown = table.visible("narrow")
    columns = [table.columns[i] for i in shown]
    rows = [[row[i] for i in shown] for row in table.rows]
    natural = [
        max([cell_len(printable(column.title)), *(_natural(column, row[i]) for row in rows)])
        for i, column in enumerate(columns)
    ]
    fitted = []
    for chosen in _chunks(columns, natural, width):
        kept = [columns[i] for i in chosen]
        widths = _shrink(kept, [natural[i] for i in chosen], width)
        fitted.append(_fit_columns(kept, [[row[i] for i in chosen] for row in rows], widths))
    return fitted


def cell_text(cell: Cell) -> str:
    """Return a cell's text with its footnote marks, safe to print."""
    return printable(cell.text).replace("\t", " ") + marks(cell.notes)


def marks(notes: Sequence[int]) -> str:
    """Return footnote numbers as one mark: `` [1,3-7]``."""
    spans: list[list[int]] = []
    for number in sorted(notes):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    texts = [
        f"{span[0]}-{span[-1]}" if len(span) > 2 else ",".join(str(number) for number in span)
        for span in spans
    ]
    return f" [{','.join(texts)}]" if texts else ""


def bar(fraction: float, width: int = BAR_WIDTH) -> str:
    """Return a bar of eighth blocks; anything above nothing shows."""
    eighths = round(min(max(fraction, 0.0), 1.0) * width * 8)
    if fraction > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def _natural(column: Column, cell: Cell) -> int:
    if column.kind == "bar":
        return BAR_WIDTH
    return max((cell_len(line) for line in cell_text(cell).split("\n")), default=0)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _least(column: Column, natural: int) -> int:
    limits = {"code": MIN_CODE, "path": MIN_CODE, "text": MIN_TEXT}
    return min(natural, limits.get(column.kind, natural))


def _chunks(columns: Sequence[Column], natural: Sequence[int], width: int) -> list[list[int]]:
    """Split the columns so that each part, led by the first column, can be made to fit."""
    least = [_least(column, size) for column, size in zip(columns, natural, strict=True)]
    chunks = [[0]] if columns else []
    for index in range(1, len(columns)):
        trial = [*chunks[-1], index]
        if len(chunks[-1]) > 1 and _total([least[i] for i in trial]) > width:
            chunks.append([0, index])
        else:
            chunks[-1] = trial
    return chunks


def _shrink(columns: Sequence[Column], natural: Sequence[int], width: int) -> list[int]:
    """Take width from texts, then from keys, then (never for our own numbers) from the widest."""
    widths = list(natural)
    stages = ((("text",), MIN_TEXT), (("code", "path"), MIN_CODE), (("number", "bar", *_SOFT), 1))
    for kinds, least in stages:
        while (excess := _total(widths) - width) > 0:
            able = [i for i, c in enumerate(columns) if c.kind in kinds and widths[i] > least]
            if not able:
                break
            widest = max(able, key=lambda i: widths[i])
            others = [widths[i] for i in able if widths[i] < widths[widest]]
            floor = max([least, *others]) if others else least
            equal = [i for i in able if widths[i] == widths[widest]]
            step = max(1, min(widths[widest] - floor, excess // len(equal)))
            for i in equal[:excess]:
                widths[i] -= step
    return widths


def _fit_columns(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], widths: Sequence[int]
) -> FittedTable:
    header = tuple(
        _pad(_cut_right(printable(column.title), size), column, size)
        for column, size in zip(columns, widths, strict=True)
    )
    fitted = tuple(
        tuple(
            FittedCell(_lines(cell, column, size), cell)
            for cell, column, size in zip(row, columns, widths, strict=True)
        )
        for row in rows
    )
    return FittedTable(header, fitted)


def _lines(cell: Cell, column: Column, width: int) -> tuple[str, ...]:
    if column.kind == "bar":
        return (bar(cell.bar, width) if cell.bar is not None else " " * width,)
    lines: list[str] = []
    for line in cell_text(cell).split("\n"):
        if cell_len(line) <= width:
            lines.append(line)
        elif column.kind == "text":
            pieces = wrap(line, width) or [""]
            lines += [_cut_right(piece, width) for piece in pieces]
        elif column.kind == "code":
            lines += _broken(line, width)
        elif column.kind == "path":
            lines.append(_cut_left(line, width))
        else:
            lines.append(_cut_right(line, width))
    return tuple(_pad(line, column, width) for line in lines)


def _broken(text: str, width: int) -> list[str]:
    """Break a key after its separators; a longer part without any is cut into pieces."""
    lines = [""]
    for part in _BREAKS.split(text):
        rest = part
        if cell_len(lines[-1]) + cell_len(rest) > width and lines[-1]:
            lines.append("")
        while cell_len(rest) > width:
            piece = _head(rest, width)
            lines[-1:] = [piece, ""]
            rest = rest[len(piece) :]
        lines[-1] += rest
    return [line.rstrip() for line in lines if line.strip()]


def _head(text: str, width: int) -> str:
    """Return the longest beginning that is at most ``width`` cells wide (at least a character)."""
    end = min(len(text), max(width, 1))
    while end > 1 and cell_len(text[:end]) > width:
        end -= 1
    return text[:end]


def _pad(text: str, column: Column, width: int) -> str:
    space = " " * (width - cell_len(text))
    return space + text if column.kind == "number" else text + space


def _cut_right(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _cut_left(text: str, width: int) -> str:
    while cell_len(text) > width - 1:
        text = text[max(1, (cell_len(text) - width + 1) // 2) :]
    return "…" + text
