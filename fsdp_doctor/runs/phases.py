"""Phase records put together: parts of one phase, and the times that follow later."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fsdp_doctor.model.memory import MemoryCounters
from fsdp_doctor.model.run import PhaseRecord

SETUP_STEP, OUTSIDE_STEP = -1, -2
"""Step numbers of phases before the first step, and of phases between steps."""

PhaseTime = tuple[str, int, float]
"""Phase, micro batch, seconds."""


def larger(a: MemoryCounters, b: MemoryCounters) -> MemoryCounters:
    """Return the larger of each counter; one that is not known gives way."""

    def pick(x: int | None, y: int | None) -> int | None:
        return y if x is None else x if y is None else max(x, y)

    return MemoryCounters(
        allocated_bytes=pick(a.allocated_bytes, b.allocated_bytes),
        reserved_bytes=pick(a.reserved_bytes, b.reserved_bytes),
        active_bytes=pick(a.active_bytes, b.active_bytes),
        requested_bytes=pick(a.requested_bytes, b.requested_bytes),
    )


def merge_parts(
    records: Iterable[PhaseRecord], times: Iterable[PhaseTime]
) -> tuple[PhaseRecord, ...]:
    """Join what a step says of one phase and micro batch: last end, largest peak, summed time."""
    seconds: dict[tuple[str, int], float] = {}
    for phase, microbatch, time_s in times:
        key = (phase, microbatch)
        seconds[key] = seconds.get(key, 0.0) + time_s
    merged: dict[tuple[str, int], PhaseRecord] = {}
    for record in records:
        key = (record.phase.value, record.microbatch)
        known = merged.get(key)
        peak = record.peak if known is None else larger(known.peak, record.peak)
        merged[key] = replace(record, peak=peak, time_s=seconds.get(key))
    return tuple(merged.values())


def match_times(
    records: Sequence[PhaseRecord], times: Iterable[PhaseTime]
) -> tuple[PhaseRecord, ...]:
    """Give every record its own time, in order: one phase may come many times outside of steps."""
    queues: dict[tuple[str, int], deque[float]] = defaultdict(deque)
    for phase, microbatch, time_s in times:
        queues[(phase, microbatch)].append(time_s)
    timed = []
    for record in records:
        queue = queues[(record.phase.value, record.microbatch)]
        timed.append(replace(record, time_s=queue.popleft() if queue else None))
    return tuple(timed)
