"""How much host memory a stretch of work takes, by Linux's own high-water mark."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from types import TracebackType

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""Written to ``clear_refs`` it sets VmHWM back to the present size (``man 5 proc``)."""


class HostPeak:
    """Context manager: resident set of this process when it began, and the largest meanwhile.

    Unknown (None) where /proc does not tell, or where the mark cannot be reset.
    """

    def __init__(self) -> None:
        self.before_bytes: int | None = None
        self.peak_bytes: int | None = None
        self._reset = False

    def __enter__(self) -> HostPeak:
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
            self._reset = True
        self.before_bytes = _read("VmRSS")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.peak_bytes = _read("VmHWM") if self._reset else None


def _read(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024
