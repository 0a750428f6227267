"""Python frames as text, cheap enough to take at every allocation."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

from fsdp_doctor.redact import short_path

MAX_FRAMES = 40
_OWN = str(Path(__file__).parent)
_DISPATCH = (
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "torch/_ops.py",
    "torch/utils/_contextlib.py",
    "torch/utils/_python_dispatch.py",
)


class FrameReader:
    """Formats frames as ``file:line function`` and remembers them."""

    def __init__(self) -> None:
        # by id, because a code object's hash reads its bytecode; the object is kept alive beside
        self._texts: dict[tuple[int, int], tuple[str | None, CodeType]] = {}

    def read(self) -> tuple[str, ...]:
        """The caller's Python frames, innermost first, without this package's and dispatch's."""
        frame = sys._getframe(1)  # noqa: SLF001
        found: list[str] = []
        texts = self._texts
        while frame is not None and len(found) < MAX_FRAMES:
            code, line = frame.f_code, frame.f_lineno
            known = texts.get((id(code), line))
            if known is None:
                known = texts[id(code), line] = (_format(code, line), code)
            if known[0] is not None:
                found.append(known[0])
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(found)


def _format(code: CodeType, line: int) -> str | None:
    path = code.co_filename
    if path.startswith(_OWN) or path.endswith(_DISPATCH):
        return None
    return f"{short_path(path)}:{line} {code.co_name}"
