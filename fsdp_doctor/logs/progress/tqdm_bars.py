r"""Progress bars of tqdm: HF Trainer, Lightning, TRL, axolotl, DeepSpeed examples.

`` 14%|##   | 13/90 [3:49:59<22:49:16, 1066.96s/it, loss=4.96]``, also redrawn with ``\r``. Bars of
loading, tokenizing and evaluation have a title; only an untitled bar or Lightning's ``Epoch n:``
counts as training steps. (tqdm 4, std.py ``format_meter``.)

HF Trainer's own dictionaries tell no step; they stand in the bar's stream and are only counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_doctor.logs.history import History, RankHistory
from fsdp_doctor.logs.progress.base import NAN, Column, Family, add_times, numbers, whole

_BAR = re.compile(
    rb"(?P<title>[^\n\r|%]{0,80}?) {0,3}\d{1,3}%\|[^|\n\r]{0,400}\| *(\d+)/(\d+)"
    rb" \[[\d:?]+<[\d:?]+, +(?:([\d.]+)(s/it|it/s)|\?)[^\n\r\]]*\]?"
)
_TRAINING = (b"", b"Training", b"Train", b"Steps", b"steps")


def _bars(history: RankHistory, columns: Sequence[Column], run: History) -> None:
    kept = [row for row in zip(*columns, strict=True) if is_training(row[0])]
    run.count("progress bar", len(kept) - len(columns[0]))
    if not kept:
        return
    _, steps, totals, rates, units = zip(*kept, strict=True)
    values = numbers(tuple(rate or b"nan" for rate in rates))
    times = [
        (1 / v if v else NAN) if unit == b"it/s" else v
        for v, unit in zip(values, units, strict=True)
    ]
    add_times(history, whole(steps), times)
    run.total_steps = whole(totals[-1:])[0]


def is_training(title: bytes) -> bool:
    """Return whether a bar of this title counts training steps."""
    name = title.rpartition(b"]:")[2].strip().rstrip(b":").strip()
    return name in _TRAINING or name.startswith(b"Epoch") or name[-1:].isdigit()


FAMILIES = (Family("progress bar", b"%|", _BAR, _bars, by_marker=True),)
