"""Memory as metric trackers print it, without a step in the line: Composer, HF Trainer of axolotl.

composer 0.14 to 0.30, callbacks/memory_monitor.py (GB is 10**9) in the console logger's lines;
axolotl 0.8 to 0.13, the Trainer's dictionary with ``memory/...`` keys (GiB).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_doctor.logs.history import History, RankHistory
from fsdp_doctor.logs.progress.base import NAN, Column, Family, add_memory, numbers

_METRIC = re.compile(
    rb"memory/(?:(current)_allocated_mem|max_(?:mem_)?allocated) ?(\([GMgm]i[Bb]\))?[\"']?:"
    rb" *([\d.]+)[^\n]*"
)
_MIB, _GIB, _GB = 1 << 20, 1 << 30, 10**9


def _metrics(history: RankHistory, columns: Sequence[Column], run: History) -> None:  # noqa: ARG001
    now, units, values = columns
    sizes = [value * _factor(unit) for value, unit in zip(numbers(values), units, strict=True)]
    pairs = list(zip(sizes, now, strict=True))
    add_memory(
        history,
        [-1] * len(sizes),
        allocated=[size if current else NAN for size, current in pairs],
        peak=[NAN if current else size for size, current in pairs],
    )


def _factor(unit: bytes | None) -> int:
    if not unit:
        return _GB
    return _MIB if unit[1:2] in b"Mm" else _GIB


FAMILIES = (Family("memory metric", b"memory/", _METRIC, _metrics, by_marker=True),)
