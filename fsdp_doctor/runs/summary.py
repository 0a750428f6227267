"""Numbers that stand for a whole run, read off its records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_doctor.model.memory import MemoryCounters, Phase
from fsdp_doctor.model.run import RankSeries, StepRecord

if TYPE_CHECKING:
    from fsdp_doctor.runs.columns import StepColumns


def columns_read(series: RankSeries) -> StepColumns | None:
    """Return a rank's steps as columns where they were read so, which costs no records."""
    if isinstance(series.steps, tuple):
        return None
    from fsdp_doctor.runs.columns import StepColumns

    return series.steps if isinstance(series.steps, StepColumns) else None


def peak(counters: list[MemoryCounters], name: str) -> int | None:
    """Return the largest known value of counter ``name``, or None."""
    values = [v for c in counters if (v := getattr(c, name)) is not None]
    return max(values) if values else None


def steady_steps(series: RankSeries) -> list[StepRecord]:
    """Return the steps that stand for steady state: the timed ones with memory counters, else the
    last observed step (CPU: counters exist only while the tracker is on).
    """

    def has_memory(step: StepRecord) -> bool:
        return any(
            p.peak.allocated_bytes is not None or p.peak.reserved_bytes is not None
            for p in step.phases
        )

    timed = [s for s in series.steps if s.kind == "timed" and has_memory(s)]
    return timed or [s for s in series.steps if s.kind == "observed" and has_memory(s)][-1:]


def steady_peak_bytes(
    series: RankSeries, phase: Phase | None = None, counter: str = "allocated_bytes"
) -> int | None:
    """Return the peak of a counter over the steady steps, in one phase or (None) in all."""
    columns = columns_read(series)
    if columns is not None and counter in ("allocated_bytes", "reserved_bytes"):
        return columns.steady_peak(counter, None if phase is None else str(phase))
    return peak(
        [
            p.peak
            for step in steady_steps(series)
            for p in step.phases
            if phase is None or p.phase == phase
        ],
        counter,
    )


def resident_bytes(series: RankSeries, counter: str = "allocated_bytes") -> int | None:
    """Return a counter at the end of the last steady step (what stays between steps)."""
    columns = columns_read(series)
    if columns is not None and counter in ("allocated_bytes", "reserved_bytes"):
        return columns.resident(counter)
    for step in reversed(steady_steps(series)):
        if step.phases:
            value: int | None = getattr(step.phases[-1].end, counter)
            return value
    return None


def outside_pytorch_bytes(step: StepRecord) -> int | None:
    """Return what the device holds beyond PyTorch's pool: context, libraries, other processes.

    None when it is not known, or when the two counters contradict each other.
    """
    reserved = step.phases[-1].end.reserved_bytes if step.phases else None
    if step.device_used_bytes is None or reserved is None:
        return None
    outside = step.device_used_bytes - reserved
    return outside if outside >= 0 else None
