"""Pages under docs/ that a benchmark fills: the words are written by hand, the table is not."""

from __future__ import annotations

from pathlib import Path

_MARK = "<!-- table -->"


def write_table(page: Path, table: str) -> None:
    """Replace what follows the mark of a page by ``table``; what stands above it stays."""
    words = page.read_text(encoding="utf-8").partition(_MARK)[0]
    page.write_text(f"{words}{_MARK}\n\n{table}", encoding="utf-8")


def show(table: str, page: Path | None) -> None:
    """Print a table, and write it into its page where one is named."""
    if page is not None:
        write_table(page, table)
    print(table)
