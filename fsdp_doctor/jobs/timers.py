"""Phase times from the timers that Megatron prints.

Megatron-LM, megatron/core/timers.py and pipeline_parallel/schedules.py: ``forward-compute`` and
``backward-compute`` are sums over the micro batches, without the communication between pipeline
stages; ``batch-generator`` runs within ``forward-compute``. Level 1 tells ``forward-backward``
alone, which is no phase.
"""

from __future__ import annotations

import math

from fsdp_doctor.logs.history import RankHistory
from fsdp_doctor.model.memory import Phase

NOTE = (
    "phase times are those of Megatron's timers: forward and backward without the communication "
    "between pipeline stages"
)
_TIMERS = {
    Phase.DATA: "batch-generator",
    Phase.FORWARD: "forward-compute",
    Phase.BACKWARD: "backward-compute",
    Phase.OPTIMIZER: "optimizer",
}


def phase_times(history: RankHistory) -> dict[int, dict[Phase, float]]:
    """Return step -> phase -> seconds; of a step that is told twice the larger."""
    found: dict[int, dict[Phase, float]] = {}
    for phase, timer in _TIMERS.items():
        steps = history.timer_steps.get(timer, ())
        for step, seconds in zip(steps, history.timers_s.get(timer, ()), strict=True):
            if step >= 0 and math.isfinite(seconds) and seconds >= 0:
                times = found.setdefault(step, {})
                times[phase] = max(times.get(phase, 0.0), seconds)
    for times in found.values():
        if Phase.FORWARD in times:
            times[Phase.FORWARD] = max(times[Phase.FORWARD] - times.get(Phase.DATA, 0.0), 0.0)
    return found
