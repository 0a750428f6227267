"""DeepSpeed: the throughput timer and ``see_memory_usage``.

deepspeed 0.5 to 0.18, utils/timer.py (``ThroughputTimer.stop``, memory since 0.6) and
runtime/utils.py (``see_memory_usage``). GB is 2**30 there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_doctor.logs.history import History, RankHistory
from fsdp_doctor.logs.progress.base import Column, Family, add_memory, numbers, whole

_TIMER = re.compile(
    rb"(?:epoch=\d+/micro_step=\d+/global_step=(\d+)|\d+/(\d+)), [^\n]{0,120}?"
    rb"MemAllocated=([\d.]+)GB, MaxMemAllocated=([\d.]+)GB[^\n]*"
)
_USAGE = re.compile(
    rb"\bMA ([\d.]+) GB +Max_MA ([\d.]+) GB +CA ([\d.]+) GB +Max_CA ([\d.]+) GB[^\n]*"
)
_GIB = 1 << 30


def _timer(history: RankHistory, columns: Sequence[Column], run: History) -> None:  # noqa: ARG001
    new, old, allocated, peak = columns
    steps = whole(tuple(a or b for a, b in zip(new, old, strict=True)))
    add_memory(history, steps, allocated=numbers(allocated, _GIB), peak=numbers(peak, _GIB))


def _usage(history: RankHistory, columns: Sequence[Column], run: History) -> None:  # noqa: ARG001
    allocated, peak, reserved, _ = columns
    add_memory(
        history,
        [-1] * len(allocated),
        allocated=numbers(allocated, _GIB),
        peak=numbers(peak, _GIB),
        reserved=numbers(reserved, _GIB),
    )


FAMILIES = (
    Family("deepspeed timer", b"MaxMemAllocated=", _TIMER, _timer, by_marker=True),
    Family("deepspeed memory", b" Max_MA ", _USAGE, _usage, by_marker=True),
)
