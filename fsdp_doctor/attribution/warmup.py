"""Has a launch reached steady state? Warm-up steps are found and marked, never deleted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fsdp_doctor.attribution.statistics import FloatArray

NOT_STEADY = 0.02
"""Relative drift between the first and the last third from which a launch is not steady."""
FEW_STEPS = 10
"""Timed steps below which a launch's median is a weak number."""
_SPREAD_LIMIT = 4.0
"""Standard errors the drift must exceed too, so that noise is not taken for a drift."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steadiness:
    """What the timed steps of one launch look like."""

    dropped: int
    """Leading steps that still belong to the warm-up."""
    drift: float
    """Drift (log) of the rest beyond noise, 0.0 when steady."""

    @property
    def steady(self) -> bool:
        """Whether the launch may be used without a warning."""
        return self.drift == 0.0


def mser(x: FloatArray) -> int:
    """Return how many leading values to drop: the marginal standard error rule (White 1997).

    The truncation that minimises ``sum((x - mean)^2) / n^2`` of the rest, searched in the first
    half; the limit itself means that no truncation was found.
    """
    limit = x.size // 2
    errors = [float(np.var(x[w:])) / (x.size - w) for w in range(limit + 1)]
    return int(np.argmin(errors))


def assess(x: FloatArray) -> Steadiness:
    """Judge the log step times of one launch, in order of time.

    MSER drops what is left of the warm-up: nothing at its limit, and nothing that differs from
    the rest by less than NOT_STEADY. Then the medians of the first and last third are compared.
    """
    if x.size < 6:
        return Steadiness(dropped=0, drift=0.0)
    drop = mser(x)
    if drop >= x.size // 2 or not _stands_out(x[:drop], x[drop:]):
        drop = 0
    return Steadiness(dropped=drop, drift=_drift(x[drop:]))


def _stands_out(start: FloatArray, rest: FloatArray) -> bool:
    return start.size > 0 and abs(float(start.mean() - np.median(rest))) > NOT_STEADY


def _drift(x: FloatArray) -> float:
    third = x.size // 3
    if third < 2:
        return 0.0
    parts = (x[:third], x[third : x.size - third], x[x.size - third :])
    shift = abs(float(np.median(parts[2]) - np.median(parts[0])))
    residuals = np.concatenate([part - np.median(part) for part in parts])
    # 1.4826 MAD estimates sigma; 1.2533 sigma / sqrt(n) is the error of a median
    spread = 1.2533 * 1.4826 * float(np.median(np.abs(residuals))) * float(np.sqrt(2 / third))
    return shift if shift > max(NOT_STEADY, _SPREAD_LIMIT * spread) else 0.0
