"""How much a change of step time depends on which steps of the launches are looked at.

Launches that drift (a GPU that gets warm, a cache that fills) have no one step time. When both
sides drift alike their ratio stands all the same; when they do not, it depends on the steps. The
interval is widened by as much as the ratio moves when a third of the steps is left out: a
sensitivity analysis of the estimate itself, where widening by the drift would hide changes that
every part of the launches shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fsdp_doctor.attribution.statistics import FloatArray
    from fsdp_doctor.attribution.times import LaunchTimes


def sway(a: Sequence[FloatArray], b: Sequence[FloatArray]) -> float:
    """Return how far the log ratio B / A moves when each launch's first or last third is left out.

    One array of seconds a launch, steps in order. Launches of fewer than three steps stay whole.
    """
    if not a or not b or min(float(x.min()) for x in (*a, *b)) <= 0.0:
        return 0.0
    whole = _log_ratio(a, b)
    without_first = _log_ratio([_part(x, last=False) for x in a], [_part(x, last=False) for x in b])
    without_last = _log_ratio([_part(x, last=True) for x in a], [_part(x, last=True) for x in b])
    return max(abs(without_first - whole), abs(without_last - whole))


def job_sway(a: Sequence[LaunchTimes], b: Sequence[LaunchTimes]) -> float:
    """Return the sway of the job's step time; 0.0 when no launch drifts."""
    if not any(t.drift for t in (*a, *b)):
        return 0.0
    return sway(*([t.step for t in side if t.step.size] for side in (a, b)))


def _part(x: FloatArray, *, last: bool) -> FloatArray:
    third = x.size // 3
    return x[: x.size - third] if last else x[third:]


def _log_ratio(a: Sequence[FloatArray], b: Sequence[FloatArray]) -> float:
    """The estimate that ``statistics.compare_samples`` makes of several launches."""
    levels = [float(np.mean([np.log(np.median(x)) for x in side])) for side in (a, b)]
    return levels[1] - levels[0]
