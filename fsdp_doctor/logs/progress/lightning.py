"""Lightning Fabric scripts (litgpt): ``iter 3436 step 53: loss 2.9911, iter time: 400.10ms``.

litgpt 0.1 to 0.5, finetune scripts. Lightning's own progress bar is tqdm's (``tqdm_bars``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_doctor.logs.history import History, RankHistory
from fsdp_doctor.logs.progress.base import Column, Family, add_times, numbers, whole

_ITER = re.compile(rb"iter (\d+)[ :|][^\n]{0,120}?iter time: ([\d.]+) ?(m?s)[^\n]*")


def _iterations(history: RankHistory, columns: Sequence[Column], run: History) -> None:  # noqa: ARG001
    steps, times, units = columns
    factors = [1e-3 if unit == b"ms" else 1.0 for unit in units]
    seconds = [t * f for t, f in zip(numbers(times), factors, strict=True)]
    add_times(history, whole(steps), seconds)


FAMILIES = (Family("litgpt iteration", b"iter time: ", _ITER, _iterations),)
