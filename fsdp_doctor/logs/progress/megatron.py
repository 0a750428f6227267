"""Megatron-LM (and GPT-NeoX's descendants), Megatron-Bridge.

Megatron-LM 0.5 to core 0.19, megatron/training/training.py ``training_log`` and
``report_memory``: the iteration line and ``[Rank r] (after n iterations) memory (MB) | ...`` in
MiB; two ranks' lines may run into one. Timers follow the iteration line, of the last rank (``time
(ms) | name: x | ...``, until 2022) or the largest over the ranks (core/timers.py). Bridge 0.1 to
0.4, training/utils/train_utils.py: decimal GB under ``mem-...-gigabytes`` keys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import compress

from fsdp_doctor.logs.history import History, RankHistory
from fsdp_doctor.logs.progress.base import (
    Column,
    Family,
    add_memory,
    add_times,
    numbers,
    whole,
)

_ITERATION = re.compile(
    rb"iteration +(\d+)/ *(\d+) \|(?:[^|\n]{0,80}\|)??"
    rb" elapsed time per iteration \(ms\): ([\d.]+)[^\n]*"
    rb"(?:\n(?=[t(m[\d])(?:\[?[\w.-]{1,40}\]?: ?)?(time \(ms\) \|[^\n]*"
    rb"|(?:\(min, max\)|max) time across ranks \(ms\):(?:\n[^\n]{0,120}?\.: [(\d][^\n]*)+))?"
)
_TIMER = re.compile(rb"([a-z][\w/-]*)(?: \.+)?: (?:\([\d.]+, )?([\d.]+)")
_MEMORY = re.compile(
    rb"\[Rank (\d+)\] \(after (\d+) iterations\) memory \(MB\) \| allocated: ([\d.]+)"
    rb" \| max allocated: ([\d.]+) \| reserved: ([\d.]+)(?: \| max reserved: [\d.]+)?[^\n\[]*"
)
_BRIDGE = re.compile(
    rb"\[Rank (\d+)\] \(after (\d+) iterations\) memory \(GB\) \| "
    rb"mem-allocated-gigabytes: ([\d.]+)[^\n]*?mem-reserved-gigabytes: ([\d.]+)"
    rb"[^\n]*?mem-max-allocated-gigabytes: ([\d.]+)[^\n]*"
)


def _iterations(history: RankHistory, columns: Sequence[Column], run: History) -> None:
    steps, totals, times, timers = columns
    numbered = whole(steps)
    add_times(history, numbered, numbers(times, 1e-3))
    run.total_steps = whole(totals[-1:])[0]
    told = any(timers)
    for step, text in compress(zip(numbered, timers, strict=True), timers) if told else ():
        found = _TIMER.findall(text.partition(b"(ms)")[2])
        for (name, _), seconds in zip(found, numbers([v for _, v in found], 1e-3), strict=True):
            history.add_timer(name.decode("ascii"), step, seconds)


def _memory(history: RankHistory, columns: Sequence[Column], run: History) -> None:  # noqa: ARG001
    _, steps, allocated, peak, reserved = columns
    add_memory(
        history,
        whole(steps),
        allocated=numbers(allocated, 1 << 20),
        peak=numbers(peak, 1 << 20),
        reserved=numbers(reserved, 1 << 20),
    )


def _bridge(history: RankHistory, columns: Sequence[Column], run: History) -> None:  # noqa: ARG001
    _, steps, allocated, reserved, peak = columns
    add_memory(
        history,
        whole(steps),
        allocated=numbers(allocated, 1e9),
        peak=numbers(peak, 1e9),
        reserved=numbers(reserved, 1e9),
    )


FAMILIES = (
    Family("megatron iteration", b"elapsed time per iteration", _ITERATION, _iterations),
    Family("megatron memory", b"memory (MB) |", _MEMORY, _memory, rank_group=0),
    Family("bridge memory", b"memory (GB) |", _BRIDGE, _bridge, rank_group=0),
)
