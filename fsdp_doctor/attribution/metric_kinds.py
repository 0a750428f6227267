"""The metrics of a comparison: their units, and whether more or less is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["bytes", "s", "count", "tokens/s"]


@dataclass(frozen=True, slots=True)
class MetricKind:
    """What all rows of one name have in common."""

    unit: Unit
    better: Literal["lower", "higher"] = "lower"
    by: Literal["phase", "category"] | None = None
    """What every row of it has; None: it has a row over the whole step."""

    @property
    def noisy(self) -> bool:
        """Whether it is a time, of which single launches say little."""
        return self.unit in ("s", "tokens/s")


METRIC_KINDS = {
    "step_time_s": MetricKind("s"),
    "peak_allocated_bytes": MetricKind("bytes"),
    "peak_reserved_bytes": MetricKind("bytes"),
    "tokens_per_s": MetricKind("tokens/s", better="higher"),
    "resident_bytes": MetricKind("bytes"),
    "first_step_peak_allocated_bytes": MetricKind("bytes"),
    "outside_pytorch_bytes": MetricKind("bytes"),
    "allocation_retries": MetricKind("count"),
    "exposed_communication_s": MetricKind("s"),
    "phase_time_s": MetricKind("s", by="phase"),
    "category_bytes": MetricKind("bytes", by="category"),
    "out_of_memory_bytes": MetricKind("bytes"),
}
"""Most important first."""
