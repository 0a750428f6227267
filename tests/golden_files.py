"""Compare text with a file in ``tests/golden``."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def assert_golden(name: str, text: str) -> None:
    """Compare ``text`` with ``tests/golden/NAME`` and show a unified diff where they differ.

    With UPDATE_GOLDEN=1 in the environment the file is rewritten instead.
    """
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != expected:
        diff = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"golden/{name}", "this run", lineterm=""
        )
        shown = "\n".join(diff) or "only line ends differ"
        raise AssertionError(f"{shown}\n(UPDATE_GOLDEN=1 accepts what this run printed)")
