"""When the peak moves between phases, one phase tells why; the other tells how far it fell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_doctor.attribution.observations import fullest_rank
from fsdp_doctor.model.comparison import Metric
from fsdp_doctor.model.run import Run
from fsdp_doctor.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedPeak:
    """Phases of the peak in A and in B; they differ."""

    a: str
    b: str

    @property
    def text(self) -> str:
        """Return that the peak moved."""
        return f"the peak moved from {self.a} to {self.b}"

    def telling_phase(self, metric: Metric) -> str:
        """Return the phase whose own change made the step's peak fall (A's) or rise (B's)."""
        return self.b if (metric.delta or 0) > 0 else self.a

    def telling(self, whole: Metric, metrics: Sequence[Metric]) -> Metric | None:
        """Return the peak of that phase when it changed firmly in the same direction as ``whole``.

        Only of the allocated peak: phases of reserved memory share one pool.
        """
        if whole.name != "peak_allocated_bytes" or whole.phase is not None:
            return None
        found = _of_phase(whole, metrics, self.telling_phase(whole))
        return found if found is not None and found.verdict == whole.verdict else None

    def where(self, whole: Metric) -> str:
        """Return e.g. ``in backward, where A peaked``."""
        side = "B" if (whole.delta or 0) > 0 else "A"
        return f"in {self.telling_phase(whole)}, where {side} peaked"

    def other(self, whole: Metric, metrics: Sequence[Metric]) -> str:
        """Return what the other phase's peak is, e.g. ``the peak is now the optimizer's 9 GiB``."""
        rose = (whole.delta or 0) > 0
        phase = self.a if rose else self.b
        found = _of_phase(whole, metrics, phase)
        value = None if found is None else (found.a if rose else found.b)
        verb = "the peak was" if rose else "the peak is now"
        text = f"{verb} {possessive(phase)} {format_bytes(value)}"
        if found is None or found.delta is None:
            return text
        if found.verdict == "same":
            return f"{text}, which did not change"
        return f"{text}, which changed by {format_bytes(found.delta, signed=True)}"


def possessive(phase: str) -> str:
    """Return ``backward's``, ``the optimizer's``."""
    return f"the {phase}'s" if phase == "optimizer" else f"{phase}'s"


def _of_phase(whole: Metric, metrics: Sequence[Metric], phase: str) -> Metric | None:
    place = (whole.name, whole.rank, phase, None)
    return next((m for m in metrics if (m.name, m.rank, m.phase, m.category) == place), None)


def find_moved_peak(a: Sequence[Run], b: Sequence[Run]) -> MovedPeak | None:
    """Return the phases of the peak on both sides when they differ and are known."""
    phases = []
    for runs in (a, b):
        series = next((s for run in runs if (s := fullest_rank(run)) is not None), None)
        if series is None or series.anatomy is None:
            return None
        phases.append(str(series.anatomy.peak_phase))
    return MovedPeak(a=phases[0], b=phases[1]) if phases[0] != phases[1] else None
