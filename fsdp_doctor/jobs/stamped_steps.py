"""Step times from the time stamps of lines that tell a step and no time (torchtitan's).

torchtitan 0.1 to 0.2, tools/logging.py: ``[titan] 2025-01-01 00:00:01,234 - root - INFO - ...``.
What lies between two lines counts, data loading and what a job does beside its steps included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from fsdp_doctor.logs.history import History
from fsdp_doctor.logs.prefix import split_prefix
from fsdp_doctor.logs.progress.base import add_times
from fsdp_doctor.logs.reader import opened, pieces
from fsdp_doctor.logs.sources import LogFile

NOTE = (
    "step times are those between the time stamps of its lines, with what the job does between "
    "steps"
)
_STEP = re.compile(rb"step: +(\d{1,15})\b")
_HEAD = 200
"""Bytes of a line that hold rank and time."""
COARSE_S = 20.0
"""Least time between stamps of whole seconds: less is mostly rounding."""


def add_stamped_times(history: History, files: Sequence[LogFile]) -> bool:
    """Add step times to the ranks that have rates; return whether there were any."""
    lines: dict[int | None, list[tuple[int, float]]] = {}
    for file in files:
        for rank, step, time in _stamps(file):
            lines.setdefault(rank, []).append((step, time))
    found = False
    for rank, stamps in lines.items():
        if rank not in history.ranks or not history.ranks[rank].rates:
            continue
        least = 0.0 if any(time % 1 for _, time in stamps) else COARSE_S
        for (before, start), (step, end) in pairwise(stamps):
            if step > before and end - start > least:
                add_times(history.ranks[rank], [step], [(end - start) / (step - before)])
                found = True
    return found


def _stamps(file: LogFile) -> Iterator[tuple[int | None, int, float]]:
    """Yield rank, step and time of the lines that tell a step and when it ended."""
    if file.path is None:
        return
    with opened(file.path) as stream:
        for piece in pieces(stream):
            for line in piece.splitlines() if b"step: " in piece else ():
                told = _STEP.search(line) if b"loss: " in line else None
                if told is None:
                    continue
                origin, _ = split_prefix(line[:_HEAD].decode("utf-8", "replace"))
                if origin.time is not None:
                    rank = file.origin.rank if origin.rank is None else origin.rank
                    yield rank, int(told[1]), origin.time
