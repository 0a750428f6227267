"""torchtitan: ``step:  1  loss: 12.2764  memory: 59.75GiB(75.75%)  tps: 1,436``.

torchtitan 0.1 to 0.2, components/metrics.py: the memory is the largest reserved since the last
line (torch.cuda.memory_stats, reset each time); colours may stand between the words. ``tps`` (once
``wps``): tokens of a data-parallel rank since the last line, by the time since then and the ranks
that share them (tensor, pipeline and context parallel), so tokens/s of each GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_doctor.logs.history import History, RankHistory
from fsdp_doctor.logs.progress.base import Column, Family, add_memory, numbers, whole

_COLOR = rb"(?:\x1b\[[\d;]*m)*"
_STEP = re.compile(
    rb"step: +(\d+) *" + _COLOR + rb" *loss: *[-\w.]+[^\n]{0,60}?memory: *([\d.]+)GiB"
    rb"(?:[^\n]{0,60}?(?:\b|\dm)[tw]ps: *([\d,]+))?[^\n]*"
)


def _steps(history: RankHistory, columns: Sequence[Column], run: History) -> None:  # noqa: ARG001
    steps, memory, rates = columns
    numbered = whole(steps)
    add_memory(history, numbered, reserved=numbers(memory, 1 << 30))
    told = [(n, rate) for n, rate in zip(numbered, rates, strict=True) if rate]
    history.rate_steps.extend([n for n, _ in told])
    history.rates.extend(numbers([rate.replace(b",", b"") for _, rate in told]))


FAMILIES = (Family("torchtitan step", b"memory: ", _STEP, _steps),)
