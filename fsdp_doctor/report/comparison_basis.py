"""What a comparison rests on, for a reader who wants to check it."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_doctor.model.basis import Basis
from fsdp_doctor.report.document import Cell, Column, Prose, Section, Table
from fsdp_doctor.report.words import UNKNOWN, plural, words

_WORD = (
    "Times are the slowest rank's of each timed step; a launch gives one number. Memory is the "
    "largest over the ranks, of the steps named here. A statement that rests on A or B rests on "
    "all of its launches that were used; on S1, S2, ... on simulations, which are listed too."
)


def basis_section(basis: Sequence[Basis]) -> list[Section]:
    """Return the section that lists every launch; none where they are not known."""
    if not basis:
        return []
    table = Table(
        columns=(
            Column("launch"),
            Column("name", "code", only="wide"),
            Column("read from", "path"),
            Column("made", only="wide"),
            Column("used", only="wide"),
            Column("ranks", "number"),
            Column("timed steps", "number"),
            Column("memory of"),
            Column("lines", only="wide"),
        ),
        rows=tuple(_row(one) for one in basis),
    )
    lines = [
        Prose(text=f"{one.label}: lines {'; '.join(one.log_places)}.")
        for one in basis
        if one.log_places
    ]
    block = Prose(text=_WORD, tone="muted")
    return [Section(title="What it rests on", blocks=(block, table, *lines), collapsed=True)]


def _row(one: Basis) -> tuple[Cell, ...]:
    memory = UNKNOWN
    if one.memory_kind is not None:
        memory = f"{plural(one.memory_steps, one.memory_kind + ' step')}"
    lines = ", ".join(f"{count:,} {words(kind)}" for kind, count in one.log_lines.items())
    return (
        Cell(one.label, "strong"),
        Cell(one.name),
        Cell(one.place or UNKNOWN),
        Cell(one.created[:19]),
        Cell("yes" if one.used else f"no, {one.status}", "plain" if one.used else "warn"),
        Cell(str(one.ranks)),
        Cell(str(one.timed_steps)),
        Cell(memory),
        Cell(lines or UNKNOWN),
    )
