"""What the difference of two snapshots means: findings, the largest change first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdp_doctor.model.finding import Advice, Evidence, Finding
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.model.snapshot import (
    CategoryChange,
    SnapshotAnalysis,
    SnapshotComparison,
    StackChange,
)
from fsdp_doctor.postmortem.causes import CAUSES
from fsdp_doctor.postmortem.diagnose import diagnose_snapshot
from fsdp_doctor.postmortem.snapshot_words import place_of
from fsdp_doctor.units import format_bytes

_CAUSES = {
    Category.PARAMETERS: "state-does-not-fit",
    Category.GRADIENTS: "state-does-not-fit",
    Category.OPTIMIZER_STATE: "state-does-not-fit",
    Category.BUFFERS: "state-does-not-fit",
    Category.ACTIVATIONS: "activations",
    Category.LOGITS: "logits",
    Category.COMMUNICATION: "communication-buffers",
    Category.UNSHARDED_PARAMETERS: "communication-buffers",
    Category.UNSHARDED_GRADIENTS: "gradient-sync",
}
MAX_STACKS_NAMED = 3


def threshold(total: int) -> int:
    """Return the change below which memory counts as the same: 1 MiB or 0.1 %."""
    return max(1 << 20, total // 1000)


def explain_comparison(comparison: SnapshotComparison) -> SnapshotComparison:
    """Return the comparison, and both its sides, with their findings."""
    comparison = replace(
        comparison, a=diagnose_snapshot(comparison.a), b=diagnose_snapshot(comparison.b)
    )
    found = [*_leak(comparison), *_categories(comparison), *_reserved(comparison)]
    return replace(comparison, findings=tuple(found))


def _categories(comparison: SnapshotComparison) -> Iterator[Finding]:
    total = comparison.moment_b.allocated_bytes - comparison.moment_a.allocated_bytes
    least = threshold(comparison.moment_a.allocated_bytes)
    for row in comparison.categories:
        delta = row.b_bytes - row.a_bytes
        if abs(delta) < least:
            continue
        cause = _cause(row.category, comparison.moment_b.phase)
        grew = delta > 0
        share = abs(delta) / max(abs(total), abs(delta))
        yield Finding(
            cause=cause,
            claim=_claim(row),
            confidence=round(min(0.95, 0.4 + 0.5 * share), 2),
            severity="warning" if grew else "note",
            evidence=tuple(
                _stack_evidence(comparison, change)
                for change in _largest(comparison.stacks, row.category, grew=grew)
            ),
            flags=CAUSES[cause].flags if cause in CAUSES and grew else (),
            advice=_advice(cause) if grew else (),
        )


def _advice(cause: str) -> tuple[Advice, ...]:
    changes = CAUSES[cause].changes if cause in CAUSES else ()
    return tuple(Advice(change=c.change, saves_text=c.saves_text, cost=c.cost) for c in changes)


def _cause(category: str, phase: Phase) -> str:
    if category == Category.TEMPORARIES:
        return "optimizer-temporaries" if phase is Phase.OPTIMIZER else "temporaries"
    return _CAUSES.get(Category(category), "unknown")


def _claim(row: CategoryChange) -> str:
    name = row.category.replace("_", " ")
    delta = row.b_bytes - row.a_bytes
    return (
        f"{name}: {format_bytes(delta, signed=True)} "
        f"({format_bytes(row.a_bytes)} -> {format_bytes(row.b_bytes)})"
    )


def _largest(stacks: tuple[StackChange, ...], category: str, *, grew: bool) -> list[StackChange]:
    fitting = [s for s in stacks if s.category == category and (s.delta_bytes > 0) == grew]
    return fitting[:MAX_STACKS_NAMED]


def _stack_evidence(comparison: SnapshotComparison, change: StackChange) -> Evidence:
    place = place_of(change.frames) or change.operator or "no stack recorded"
    counts = f"{change.a_count} -> {change.b_count} blocks"
    return Evidence(
        text=f"{change.what}: {place}, {counts}",
        file=comparison.b.path,
        rank=comparison.b.rank,
        step=comparison.moment_b.step,
        bytes=change.delta_bytes,
    )


def _leak(comparison: SnapshotComparison) -> Iterator[Finding]:
    def leaks(side: SnapshotAnalysis) -> bool:
        return side.growth is not None and side.growth.leaking

    if leaks(comparison.b) and not leaks(comparison.a):
        yield from (f for f in comparison.b.findings if f.cause == "leak")


def _reserved(comparison: SnapshotComparison) -> Iterator[Finding]:
    """More reserved than the allocated memory explains: fragmentation, or another setting."""
    a, b = comparison.a, comparison.b
    reserved = b.peak_reserved_bytes - a.peak_reserved_bytes
    allocated = b.peak.allocated_bytes - a.peak.allocated_bytes
    extra = reserved - allocated
    if reserved <= 0 or extra < max(threshold(a.peak_reserved_bytes), a.peak_reserved_bytes // 20):
        return
    changed = changed_settings(a, b)
    claim = (
        f"peak reserved grew by {format_bytes(reserved)}, peak allocated by "
        f"{format_bytes(allocated, signed=True)}: the rest lies in free pieces"
    )
    text = ", ".join(f"{key}: {old} -> {new}" for key, old, new in changed)
    evidence = Evidence(
        text=f"allocator settings changed: {text}" if text else "allocator settings are the same",
        file=b.path,
        rank=b.rank,
        bytes=extra,
    )
    yield Finding(
        cause="fragmentation",
        claim=claim,
        confidence=0.6,
        severity="warning",
        evidence=(evidence,),
        flags=tuple(key for key, _, _ in changed) or CAUSES["fragmentation"].flags,
        advice=_advice("fragmentation"),
    )


def changed_settings(
    a: SnapshotAnalysis, b: SnapshotAnalysis
) -> list[tuple[str, str | int | float | bool | None, str | int | float | bool | None]]:
    """Return the allocator settings that differ: (name, A, B)."""
    return [
        (key, a.settings.get(key), b.settings.get(key))
        for key in sorted({**a.settings, **b.settings})
        if a.settings.get(key) != b.settings.get(key)
    ]
