"""torchtitan: ``step:  1  loss: 12.2764  memory: 59.75GiB(75.75%)  tps: 1,436``.

torchtitan 0.1 to 0.2, components/metrics.py: the memory is the largest reserved since the last
line (torch.cuda.memory_stats, reset each time); colours may stand between the words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_doctor.logs.history import History, RankHistory
from fsdp_doctor.logs.progress.base import Column, Family, add_memory, numbers, whole

_COLOR = rb"(?:\x1b\[[\d;]*m)*"
_STEP = re.compile(
    rb"step: +(\d+) *" + _COLOR + rb" *loss: *[-\w.]+[^\n]{0,60}?memory: *([\d.]+)GiB[^\n]*"
)


def _steps(history: RankHistory, columns: Sequence[Column], run: History) -> None:  # noqa: ARG001
    steps, memory = columns
    add_memory(history, whole(steps), reserved=numbers(memory, 1 << 30))


FAMILIES = (Family("torchtitan step", b"memory: ", _STEP, _steps),)
