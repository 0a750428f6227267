"""What a snapshot's numbers mean: causes with their evidence, the most likely first.

The causes are those of the post-mortem's vocabulary. A share of memory is no proof of guilt, so the
confidence of "this filled it" grows with the share and shrinks with what nobody can name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsdp_doctor.memory.snapshot_advice import ADVICE
from fsdp_doctor.model.finding import Evidence, Finding
from fsdp_doctor.model.memory import Category, Phase, TopAllocation
from fsdp_doctor.model.snapshot import OomEvent, SnapshotAnalysis
from fsdp_doctor.units import format_bytes

MiB = 1 << 20
LEAST_SHARE = 0.15
"""A group of categories below this share of the memory is not named as what filled it."""
MINOR_SHARE = 0.03
"""Free pieces below this share of the reserved memory are no more than the usual waste."""

_FILLS: tuple[tuple[str, str, frozenset[Category]], ...] = (
    (
        "state-does-not-fit",
        "parameters, gradients and optimizer state",
        frozenset(
            {Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE, Category.BUFFERS}
        ),
    ),
    ("activations", "activations", frozenset({Category.ACTIVATIONS})),
    ("logits", "logits and the loss", frozenset({Category.LOGITS})),
    (
        "communication-buffers",
        "communication buffers and gathered parameters",
        frozenset(
            {
                Category.COMMUNICATION,
                Category.UNSHARDED_PARAMETERS,
                Category.UNSHARDED_GRADIENTS,
            }
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class _Case:
    """An analysis and how its evidence is written."""

    analysis: SnapshotAnalysis

    def evidence(self, text: str, size: int | None = None, step: int | None = None) -> Evidence:
        a = self.analysis
        return Evidence(text=text, file=a.path, rank=a.rank, step=step, bytes=size)

    @property
    def oom(self) -> OomEvent | None:
        return self.analysis.oom

    def finding(
        self, cause: str, claim: str, confidence: float, *evidence: Evidence, note: bool = False
    ) -> Finding:
        """A finding: an error where a request failed, else a warning or a note."""
        return Finding(
            cause=cause,
            claim=claim,
            confidence=round(min(max(confidence, 0.05), 0.97), 2),
            severity="note" if note else ("error" if self.oom else "warning"),
            evidence=evidence,
            flags=ADVICE[cause].flags if cause in ADVICE else (),
            advice=ADVICE[cause].advice if cause in ADVICE else (),
        )


def find_causes(analysis: SnapshotAnalysis) -> SnapshotAnalysis:
    """Return the analysis with its findings, the most likely first."""
    case = _Case(analysis)
    found = [
        *_leak(case),
        *_fragmentation(case),
        *_elsewhere(case),
        *_pending(case),
        *_private_pools(case),
        *_optimizer(case),
        *_filled(case),
        *_limit(case),
    ]
    order = {"error": 0, "warning": 1, "note": 2}
    found.sort(key=lambda f: (order[f.severity], -f.confidence))
    return replace(analysis, findings=tuple(found))


def _leak(case: _Case) -> Iterator[Finding]:
    growth = case.analysis.growth
    if growth is None or not growth.leaking:
        return
    starts = growth.start_allocated_bytes
    total = starts[-1] - starts[1]
    evidence = [
        case.evidence(
            f"from {format_bytes(starts[1])} when step {growth.steps[1]} begins to "
            f"{format_bytes(starts[-1])} when step {growth.steps[-1]} begins",
            total,
        ),
        *(case.evidence(f"kept: {_named(top)}", top.bytes) for top in growth.suspects[:3]),
    ]
    claim = (
        f"memory grows by {format_bytes(growth.per_step_bytes)} a step: "
        "blocks of earlier steps are never freed"
    )
    yield case.finding("leak", claim, 0.9, *evidence)


def _fragmentation(case: _Case) -> Iterator[Finding]:
    oom, space = case.oom, case.analysis.space
    if oom is not None and oom.verdict in ("fragmented", "combined"):
        whole = oom.verdict == "fragmented"
        claim = (
            f"{format_bytes(oom.free_bytes)} were reserved and free where "
            f"{format_bytes(oom.requested_bytes)} were asked for, but the largest piece was "
            f"{format_bytes(oom.largest_free_bytes)}"
        )
        evidence = [case.evidence("free in pieces too small for the request", oom.free_bytes)]
        evidence += [
            case.evidence(
                f"segment of {format_bytes(p.size_bytes)} held by {p.blocks} blocks, the largest "
                f"{_named(p.pinned_by)}",
                p.free_bytes,
            )
            for p in space.pinned[:2]
        ]
        much = oom.free_bytes >= MINOR_SHARE * case.analysis.focus.reserved_bytes
        sure = (0.85 if whole else 0.6) if much else 0.15
        yield case.finding("fragmentation", claim, sure, *evidence)
    elif oom is None and space.pinned_free_bytes > _tenth(case):
        claim = (
            f"{format_bytes(space.pinned_free_bytes)} are reserved and free, but held by the "
            "blocks beside them"
        )
        yield case.finding(
            "fragmentation", claim, 0.5, case.evidence("free, not releasable", space.free_bytes)
        )


def _tenth(case: _Case) -> int:
    return max(case.analysis.peak_reserved_bytes // 10, 256 * MiB)


def _elsewhere(case: _Case) -> Iterator[Finding]:
    oom = case.oom
    if oom is None or oom.elsewhere_bytes < oom.requested_bytes or oom.verdict == "fitting":
        return
    private = any(
        p.pool != (0, 0) and p.largest_free_bytes >= oom.requested_bytes
        for p in case.analysis.space.pools
    )
    cause = "cuda-graph-pools" if private and oom.pool == (0, 0) else "stream-reuse"
    whose = "a private pool" if cause == "cuda-graph-pools" else "another stream"
    claim = (
        f"a free piece of {format_bytes(oom.elsewhere_bytes)} would have held the request of "
        f"{format_bytes(oom.requested_bytes)}, but it belongs to {whose}"
    )
    evidence = case.evidence(f"largest free piece of {whose}", oom.elsewhere_bytes)
    much = oom.elsewhere_bytes >= MINOR_SHARE * case.analysis.focus.reserved_bytes
    yield case.finding(cause, claim, 0.7 if much else 0.15, evidence)


def _pending(case: _Case) -> Iterator[Finding]:
    focus = case.analysis.focus
    held = focus.active_bytes - focus.allocated_bytes
    least = case.oom.requested_bytes if case.oom else max(focus.active_bytes // 20, 64 * MiB)
    if held < max(least, MiB):
        return
    claim = f"{format_bytes(held)} were freed but still in use on another stream"
    evidence = case.evidence("freed, waiting for a stream", held, focus.step)
    part = held / focus.active_bytes
    sure = 0.5 + 0.45 * part if part >= MINOR_SHARE else 0.15
    yield case.finding("stream-reuse", claim, sure, evidence)


def _private_pools(case: _Case) -> Iterator[Finding]:
    pools = [p for p in case.analysis.space.pools if p.pool != (0, 0)]
    reserved = sum(p.reserved_bytes for p in pools)
    if reserved <= _tenth(case):
        return
    claim = f"private pools (CUDA graphs) keep {format_bytes(reserved)} reserved"
    free = sum(p.free_bytes for p in pools)
    yield case.finding("cuda-graph-pools", claim, 0.4, case.evidence("free in private pools", free))


def _optimizer(case: _Case) -> Iterator[Finding]:
    focus = case.analysis.focus
    size = focus.categories.get(Category.TEMPORARIES.value, 0)
    if focus.phase is not Phase.OPTIMIZER or size < LEAST_SHARE * focus.allocated_bytes:
        return
    claim = f"temporaries of the optimizer step hold {_part(size, focus.allocated_bytes)}"
    yield case.finding(
        "optimizer-temporaries",
        claim,
        0.75,
        case.evidence("temporaries in the optimizer step", size, focus.step),
        *_tops(case, frozenset({Category.TEMPORARIES})),
    )


def _filled(case: _Case) -> Iterator[Finding]:
    focus = case.analysis.focus
    total = max(focus.allocated_bytes, 1)
    unknown = focus.categories.get(Category.UNKNOWN.value, 0)
    where = "at the request that failed" if case.oom else "at the peak"
    for cause, name, members in _FILLS:
        size = sum(focus.categories.get(member.value, 0) for member in members)
        if size < LEAST_SHARE * total:
            continue
        claim = f"{name} hold {_part(size, total)} {where}"
        parts = [
            case.evidence(member.value.replace("_", " "), focus.categories[member.value])
            for member in sorted(members, key=lambda m: -focus.categories.get(m.value, 0))
            if focus.categories.get(member.value)
        ]
        named = size / max(total - unknown, 1)
        confidence = (0.75 * named + (0.1 if named > 0.5 else 0.0)) * (1 - 0.5 * unknown / total)
        confidence *= focus.allocated_bytes / max(focus.active_bytes, 1)
        yield case.finding(
            cause, claim, confidence, *parts, *_tops(case, members), note=case.oom is None
        )


def _tops(case: _Case, members: frozenset[Category]) -> list[Evidence]:
    tops = [t for t in case.analysis.focus.top_allocations if t.category in members]
    return [case.evidence(_named(top), top.bytes, top.step) for top in tops[:2]]


def _limit(case: _Case) -> Iterator[Finding]:
    oom = case.oom
    if oom is None or oom.device_free_bytes is None or oom.device_free_bytes < oom.driver_bytes:
        return
    claim = (
        f"the device had {format_bytes(oom.device_free_bytes)} free when "
        f"{format_bytes(oom.driver_bytes)} were refused: a limit of the process was reached, "
        "not the device's end"
    )
    evidence = case.evidence("free on the device", oom.device_free_bytes)
    yield case.finding("memory-limit", claim, 0.9, evidence, note=True)


def _part(size: int, total: int) -> str:
    return f"{format_bytes(size)} of {format_bytes(total)} ({size / max(total, 1):.0%})"


def place_of(frames: tuple[str, ...]) -> str | None:
    """Who asked: the innermost frame, and the innermost of the user's own where that differs."""
    if not frames:
        return None
    own = next((frame for frame in frames if not frame.startswith("torch/")), None)
    return frames[0] if own in (None, frames[0]) else f"{frames[0]} < {own}"


def _named(top: TopAllocation) -> str:
    """An allocation in a few words."""
    what = top.category.value.replace("_", " ")
    place = top.module or place_of(top.frames) or top.operator
    count = f"{top.count} blocks of " if top.count > 1 else ""
    return f"{count}{what}" + (f", {place}" if place else "")
