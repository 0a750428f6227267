"""Write the table of changes in docs/fit.md from fsdp_doctor/fit/moves.py.

    python docs/generate_fit.py

A test fails when the page is not what this writes.
"""

from __future__ import annotations

from pathlib import Path

from fsdp_doctor.fit.legal import yaml_text
from fsdp_doctor.fit.moves import MOVES
from fsdp_doctor.report.fit_document import NUMERICS

PAGE = Path(__file__).parent / "fit.md"
BEGIN, END = "<!-- moves -->\n", "<!-- end of moves -->\n"


def table() -> str:
    """Return one row for each change."""
    rows = ["| change | sets | saves | costs | numbers |", "|---|---|---|---|---|"]
    for move in MOVES:
        texts = [*_fields(move.sets), *(f"`{n}={v}`" for n, v in move.environment.items())]
        rows.append(
            f"| {move.title} | {', '.join(texts)} | {move.saves} | {move.costs} | "
            f"{NUMERICS[move.numerics]} |"
        )
    return "\n".join(rows) + "\n"


def _fields(sets: object) -> list[str]:
    assert isinstance(sets, dict)
    found = []
    for key, value in sets.items():
        name = key.removeprefix("config.")
        found.append(f"`{name}`" if callable(value) else f"`{name}: {yaml_text(value)}`")
    return found


def page() -> str:
    """Return the whole page with the table in its place."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
