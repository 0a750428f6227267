"""Lines of other training loops: a step, and memory with its unit after it.

``step 12 loss 3.21 allocated 12.30 GiB``, ``iteration=12 mem: 8123 MB`` and the like. Read only
where no known framework's lines are in the same piece of the log.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_doctor.logs.history import History, RankHistory
from fsdp_doctor.logs.progress.base import NAN, Column, Family, add_memory, numbers, whole

_LINE = re.compile(
    rb"\b(?:[Ss]tep|STEP|[Ii]ter(?:ation)?)[ =:#\[]{1,3}(\d+)[^\n\r]{0,200}?"
    rb"(?:\b|_)(?i:(mem(?:ory)?|(?:max_|peak_)?(?:allocated|alloc|reserved)))"
    rb"[\w ()/]{0,20}?[=: ]{1,3}"
    rb"([\d.]+) ?([GMK])i?B?\b[^\n\r]*"
)
_UNITS = {b"G": 1 << 30, b"M": 1 << 20, b"K": 1 << 10}


def _lines(history: RankHistory, columns: Sequence[Column], run: History) -> None:  # noqa: ARG001
    steps, words, values, units = columns
    sizes = [v * _UNITS[u] for v, u in zip(numbers(values), units, strict=True)]
    reserved = [b"reserved" in word.lower() for word in words]
    peak = [word.lower().startswith((b"max", b"peak")) for word in words]
    pairs = list(zip(sizes, reserved, peak, strict=True))
    add_memory(
        history,
        whole(steps),
        allocated=[NAN if r or p else size for size, r, p in pairs],
        peak=[size if p and not r else NAN for size, r, p in pairs],
        reserved=[size if r else NAN for size, r, _ in pairs],
    )


FAMILY = Family("other memory line", b"", _LINE, _lines, by_marker=False)
"""Found by the words below; see ``MARKERS``."""

MARKERS = (b"mem", b"alloc", b"reserved")
