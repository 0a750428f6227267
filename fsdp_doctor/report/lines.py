"""Plain lines of text output that several commands print: escaped, folded, indented."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_doctor.redact import redact_text
from fsdp_doctor.report.diff_text import clean

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 30


def listed(console: Console, title: str, texts: Sequence[str]) -> None:
    """Print a title with the number of ``texts``, then the first of them."""
    if not texts:
        return
    console.print()
    line(console, f"{title} ({len(texts)})", "bold")
    for text in texts[:_SHOWN]:
        wrapped(console, redact_text(text), 2)
    if len(texts) > _SHOWN:
        wrapped(console, f"... and {len(texts) - _SHOWN} more", 2)


def line(console: Console, text: str, style: str = "") -> None:
    """Print a line; control characters and markup of strangers are shown, not obeyed."""
    from rich.text import Text

    console.print(Text(clean(text), style=style))


def wrapped(console: Console, text: str, indent: int, style: str = "") -> None:
    """Print a paragraph, every line of it indented."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(clean(text), style=style, overflow="fold"), (0, 0, 0, indent)))
