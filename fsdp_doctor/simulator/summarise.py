"""From the log of a dry run to the estimate of a rank. No torch."""

from __future__ import annotations

from dataclasses import replace

from fsdp_doctor.memory.caching_allocator import AllocatorSettings, OutOfMemoryModelled
from fsdp_doctor.memory.events import EventLog
from fsdp_doctor.memory.expandable_segments import make_allocator
from fsdp_doctor.memory.replay import PhaseCounters, Replay, StreamNotes, replay_log
from fsdp_doctor.memory.timeline import build_anatomy
from fsdp_doctor.model.estimate import PhaseEstimate, RankEstimate, StepEstimate
from fsdp_doctor.model.memory import Anatomy, Category

SOURCE = "fake"


def summarise(
    log: EventLog,
    streams: StreamNotes,
    *,
    rank: int,
    settings: AllocatorSettings,
    capacities: tuple[int, ...] = (),
) -> RankEstimate:
    """Replay ``log`` and describe its first step and its last, the steady one."""
    _round_sizes(log, settings)
    prompt = replay_log(log, settings, streams.without_uses())
    late = replay_log(log, settings, streams) if streams.uses else prompt
    last = max(span.step for span in log.phases)
    steady = _anatomy(log, prompt, last)
    first = _anatomy(log, prompt, 0) if last else steady
    setup = [p.peak.allocated_bytes or 0 for p in prompt.phases if p.span.step < 0]
    return RankEstimate(
        rank=rank,
        first_step=_step(first, prompt, late),
        steady=_step(steady, prompt, late),
        top_allocations=steady.top_allocations,
        setup_peak_bytes=max(setup, default=0),
        fits={str(limit): _completes(log, streams, settings, limit) for limit in capacities},
        events=log.position,
    )


def _round_sizes(log: EventLog, settings: AllocatorSettings) -> None:
    allocator = make_allocator(settings)
    for allocation in log.allocations:
        allocation.size_bytes = allocator.round_size(allocation.requested_bytes)


def _completes(
    log: EventLog, streams: StreamNotes, settings: AllocatorSettings, capacity: int
) -> bool:
    try:
        replay_log(log, replace(settings, capacity_bytes=capacity), streams)
    except OutOfMemoryModelled:
        return False
    return True


def _of_step(replay: Replay, step: int) -> dict[str, list[PhaseCounters]]:
    found: dict[str, list[PhaseCounters]] = {}
    for counters in replay.phases:
        if counters.span.step == step:
            found.setdefault(counters.span.phase.value, []).append(counters)
    return found


def _anatomy(log: EventLog, replay: Replay, step: int) -> Anatomy:
    """The anatomy of a step; what the allocator counts beyond the blocks asked for is rounding."""
    measured = {
        phase: max(item.peak.allocated_bytes or 0 for item in counters)
        for phase, counters in _of_step(replay, step).items()
    }
    return build_anatomy(log, step, source=SOURCE, measured_peak_bytes=measured)


def _step(anatomy: Anatomy, prompt: Replay, late: Replay) -> StepEstimate:
    counters = _of_step(prompt, anatomy.step)
    high = _reserved(_of_step(late, anatomy.step))
    low = _reserved(counters)
    phases = {}
    for name, items in counters.items():
        phases[name] = PhaseEstimate(
            peak_allocated_bytes=anatomy.phases[name].peak_allocated_bytes,
            peak_reserved_bytes=max(low[name], high[name]),
            end_allocated_bytes=items[-1].end.allocated_bytes or 0,
            categories=anatomy.phases[name].categories,
        )
    last = next(p for p in reversed(prompt.phases) if p.span.step == anatomy.step)
    resident = last.end.allocated_bytes or 0
    return StepEstimate(
        peak_allocated_bytes=anatomy.peak_allocated_bytes,
        peak_reserved_bytes=max(phase.peak_reserved_bytes for phase in phases.values()),
        peak_reserved_low_bytes=max(low.values()),
        peak_phase=anatomy.peak_phase,
        resident_bytes=resident,
        resident=_with_rounding(anatomy.resident, resident),
        categories=anatomy.categories,
        phases=phases,
    )


def _reserved(counters: dict[str, list[PhaseCounters]]) -> dict[str, int]:
    return {
        name: max(item.peak.reserved_bytes or 0 for item in items)
        for name, items in counters.items()
    }


def _with_rounding(categories: dict[str, int], total: int) -> dict[str, int]:
    rest = total - sum(categories.values())
    return {**categories, Category.ROUNDING.value: rest} if rest else categories
