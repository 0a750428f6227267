"""Python frames as text, cheap enough to take at every allocation."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

MAX_FRAMES = 40
_OWN = str(Path(__file__).parent)
_DISPATCH = (
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "torch/_ops.py",
    "torch/utils/_contextlib.py",
    "torch/utils/_python_dispatch.py",
)


def shorten(path: str) -> str:
    """The part of a path after ``site-packages/``, which is the same on every machine."""
    return path.rpartition("site-packages/")[2]


class FrameReader:
    """Formats frames as ``file:line function`` and remembers them."""

    def __init__(self) -> None:
        self._texts: dict[tuple[CodeType, int], str | None] = {}

    def read(self) -> tuple[str, ...]:
        """The caller's Python frames, innermost first, without this package's and dispatch's."""
        frame = sys._getframe(1)  # noqa: SLF001
        found: list[str] = []
        texts = self._texts
        while frame is not None and len(found) < MAX_FRAMES:
            key = (frame.f_code, frame.f_lineno)
            if key in texts:
                text = texts[key]
            else:
                text = texts[key] = _format(*key)
            if text is not None:
                found.append(text)
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(found)


def _format(code: CodeType, line: int) -> str | None:
    path = code.co_filename
    if path.startswith(_OWN) or path.endswith(_DISPATCH):
        return None
    return f"{shorten(path)}:{line} {code.co_name}"
