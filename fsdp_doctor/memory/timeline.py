"""From a log of events to peaks, categories and the anatomy of a step. Exact integers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from fsdp_doctor.memory.categories import classify
from fsdp_doctor.memory.events import Allocation, EventLog, PhaseSpan
from fsdp_doctor.model.memory import Anatomy, Category, Phase, PhaseAnatomy, TopAllocation

SETUP_STEP = -1
TOP_ALLOCATIONS = 40
GAP_SCRATCH_BYTES = 4096
"""Work outside of named phases that allocates no more than this (scalars) is not told apart."""
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(slots=True)
class PhasePeak:
    """The largest moment of a phase over its micro batches."""

    phase: Phase
    peak_bytes: int
    position: int
    """Events before the peak."""
    end_bytes: int
    """At the end of the last micro batch's phase."""
    rise_bytes: int = 0
    """Largest peak above the level at which the phase began."""


@dataclass(slots=True)
class StepMemory:
    """One step of a log: its phases' peaks and its own."""

    step: int
    phases: dict[Phase, PhasePeak] = field(default_factory=dict)
    """In order of first appearance."""
    end_position: int = 0

    @property
    def peak(self) -> PhasePeak | None:
        """The phase with the largest peak (the first of equals), or None without phases."""
        return max(self.phases.values(), key=lambda peak: peak.peak_bytes, default=None)


def level_curve(log: EventLog) -> list[int]:
    """Bytes alive at every position, 0 to ``log.position``."""
    sizes = [allocation.size_bytes for allocation in log.allocations]
    curve = [0]
    level = 0
    for event in log.events:
        level += sizes[event - 1] if event > 0 else -sizes[-event - 1]
        curve.append(level)
    return curve


def analyse(log: EventLog, step: int, curve: list[int] | None = None) -> StepMemory:
    """Peaks of the phases of ``step``; micro batches are merged (largest peak, last end)."""
    curve = level_curve(log) if curve is None else curve
    result = StepMemory(step=step)
    for span in log.phases:
        if span.step != step:
            continue
        peak = _span_peak(span, curve)
        known = result.phases.get(span.phase)
        if known is None:
            result.phases[span.phase] = peak
        else:
            if peak.peak_bytes > known.peak_bytes:
                known.peak_bytes, known.position = peak.peak_bytes, peak.position
            known.end_bytes = peak.end_bytes
            known.rise_bytes = max(known.rise_bytes, peak.rise_bytes)
        result.end_position = len(curve) - 1 if span.end is None else span.end
    gap = result.phases.get(Phase.UNKNOWN)
    if gap is not None and len(result.phases) > 1 and gap.rise_bytes <= GAP_SCRATCH_BYTES:
        del result.phases[Phase.UNKNOWN]
    return result


def _span_peak(span: PhaseSpan, curve: list[int]) -> PhasePeak:
    end = len(curve) - 1 if span.end is None else span.end
    peak = max(curve[span.begin : end + 1])
    position = curve.index(peak, span.begin, end + 1)
    return PhasePeak(
        phase=span.phase,
        peak_bytes=peak,
        position=position,
        end_bytes=curve[end],
        rise_bytes=peak - curve[span.begin],
    )


def alive(log: EventLog, position: int) -> list[Allocation]:
    """Blocks that exist after the first ``position`` events, categorised."""
    found = [allocation for allocation in log.allocations if allocation.alive_at(position)]
    for allocation in found:
        if allocation.category is None:
            allocation.category, allocation.subcategory = classify(allocation, log)
    return found


def by_category(allocations: Iterable[Allocation]) -> dict[str, int]:
    """Category -> bytes, the largest first; categories without bytes are left out."""
    sums: dict[str, int] = {}
    for allocation in allocations:
        name = (allocation.category or Category.UNKNOWN).value
        sums[name] = sums.get(name, 0) + allocation.size_bytes
    ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
    return {name: size for name, size in ordered if size}


def fold_layers(module: str | None) -> str | None:
    """``blocks.3.attention`` -> ``blocks.*.attention``: equal layers count together."""
    return None if module is None else _LAYER.sub("*", module)


def top_allocations(
    allocations: Iterable[Allocation], limit: int = TOP_ALLOCATIONS
) -> tuple[TopAllocation, ...]:
    """Groups of blocks made by the same code for the same purpose, the largest first."""
    groups: dict[tuple[object, ...], list[Allocation]] = {}
    for allocation in allocations:
        key = (
            allocation.category,
            allocation.subcategory,
            allocation.phase,
            fold_layers(allocation.module),
            allocation.operator,
            allocation.frames,
        )
        groups.setdefault(key, []).append(allocation)
    tops = [_top(members) for members in groups.values()]
    tops.sort(key=lambda top: (-top.bytes, top.category, top.module or ""))
    return tuple(tops[:limit])


def _top(members: list[Allocation]) -> TopAllocation:
    first = members[0]
    modules = {allocation.module for allocation in members}
    steps = {allocation.step for allocation in members}
    return TopAllocation(
        bytes=sum(allocation.size_bytes for allocation in members),
        count=len(members),
        category=first.category or Category.UNKNOWN,
        subcategory=first.subcategory,
        phase=first.phase,
        step=first.step if len(steps) == 1 else None,
        module=(first.module if len(modules) == 1 else fold_layers(first.module)) or None,
        operator=first.operator,
        frames=first.frames,
    )


def build_anatomy(
    log: EventLog,
    step: int,
    *,
    source: str,
    measured_peak_bytes: dict[str, int] | None = None,
    expected_bytes: dict[str, int] | None = None,
    incomplete: str | None = None,
    unfinished: bool = False,
) -> Anatomy:
    """The anatomy of ``step``, with the set-up phases (step -1) beside it.

    An ``unfinished`` step is that of its last phase, where it failed: a larger peak before is not
    what ended it, and nothing is resident yet.

    ``measured_peak_bytes`` (phase -> bytes, from the device's own counters) overrules the log: what
    the log cannot see goes to category ``rounding``, and a contradiction is named in
    ``incomplete``.

    Raises:
        ValueError: the log has no phase of that step.
    """
    curve = level_curve(log)
    memory = analyse(log, step, curve)
    notes = [] if incomplete is None else [incomplete]
    measured = measured_peak_bytes or {}
    phases: dict[str, PhaseAnatomy] = {}
    for setup in analyse(log, SETUP_STEP, curve).phases.values() if step != SETUP_STEP else ():
        phases[setup.phase.value] = _phase_anatomy(log, setup, {}, notes)
    for peak in memory.phases.values():
        phases[peak.phase.value] = _phase_anatomy(log, peak, measured, notes)
    if not memory.phases:
        raise ValueError(f"step {step} was not observed")
    if unfinished:
        span = next(span for span in reversed(log.phases) if span.step == step)
        peak = _span_peak(span, curve)
        whole = _phase_anatomy(log, peak, measured, notes)
        phases.setdefault(peak.phase.value, whole)
    else:
        peak = max(memory.phases.values(), key=lambda p: _rank(p, phases))
        whole = phases[peak.phase.value]
    return Anatomy(
        step=step,
        source=source,
        peak_phase=peak.phase,
        peak_allocated_bytes=whole.peak_allocated_bytes,
        categories=dict(whole.categories),
        phases=phases,
        resident={} if unfinished else by_category(alive(log, memory.end_position)),
        top_allocations=top_allocations(alive(log, peak.position)),
        expected_bytes=dict(expected_bytes or {}),
        events=log.position,
        incomplete="; ".join(notes) or None,
    )


def _rank(peak: PhasePeak, phases: dict[str, PhaseAnatomy]) -> tuple[int, bool]:
    """What the step's peak is chosen by: the largest; of equals the first that has a name."""
    return phases[peak.phase.value].peak_allocated_bytes, peak.phase is not Phase.UNKNOWN


SMALL_BLOCK_BYTES = 1 << 20
"""Blocks above this come from the large pool; a rest of at most this much of a large block is not
split off (``kSmallSize``, c10/cuda/CUDACachingAllocator.h, torch 2.6 - 2.14)."""


def unsplit_limit_bytes(sizes: Iterable[int]) -> int:
    """Return how much the allocator can count beyond blocks of these sizes by not splitting."""
    return sum(SMALL_BLOCK_BYTES for size in sizes if size > SMALL_BLOCK_BYTES)


def _phase_anatomy(
    log: EventLog, peak: PhasePeak, measured: dict[str, int], notes: list[str]
) -> PhaseAnatomy:
    live = alive(log, peak.position)
    categories = by_category(live)
    total = peak.peak_bytes
    truth = measured.get(peak.phase.value)
    if truth is not None:
        rest = truth - total
        if rest < 0:
            notes.append(
                f"{peak.phase.value}: the device counted {-rest} bytes less than the history"
            )
        else:
            total = truth
            if rest:
                categories[Category.ROUNDING.value] = rest
            if rest > unsplit_limit_bytes(a.size_bytes for a in live):
                notes.append(f"{peak.phase.value}: {rest} bytes of the peak are not in the history")
    return PhaseAnatomy(
        peak_allocated_bytes=total, end_allocated_bytes=peak.end_bytes, categories=categories
    )
