"""What a memory snapshot shows, under the names that rules look at.

``held_*`` are bytes at the refused request (else at the peak), ``share_*`` their share of what is
allocated there, ``part_*`` that share as evidence: of what can be named, less where much cannot,
and less where the request failed for want of a fitting piece instead of for want of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fsdp_doctor.memory.snapshot_whatif import EXPANDABLE, recorded_settings
from fsdp_doctor.model.finding import Evidence
from fsdp_doctor.model.memory import Category, Phase, TopAllocation
from fsdp_doctor.model.snapshot import SnapshotAnalysis
from fsdp_doctor.postmortem.snapshot_words import named
from fsdp_doctor.units import format_bytes

GROUPS: dict[str, frozenset[Category]] = {
    "state": frozenset(
        {Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE, Category.BUFFERS}
    ),
    "activations": frozenset({Category.ACTIVATIONS}),
    "logits": frozenset({Category.LOGITS}),
    "gathered": frozenset({Category.COMMUNICATION, Category.UNSHARDED_PARAMETERS}),
    "whole_gradients": frozenset({Category.UNSHARDED_GRADIENTS}),
    "temporaries": frozenset({Category.TEMPORARIES}),
    "unknown": frozenset({Category.UNKNOWN}),
}
_CAUSES = {
    "state": "state-does-not-fit",
    "activations": "activations",
    "logits": "logits",
    "gathered": "communication-buffers",
    "whole_gradients": "gradient-sync",
    "temporaries": "optimizer-temporaries",
}
SIZES = frozenset(
    {
        *(f"held_{group}" for group in (*GROUPS, "waiting", "copies")),
        *("held", "pieces", "largest_piece", "elsewhere", "private_reserved", "pinned_free"),
        *("kept", "kept_per_step", "kept_first", "kept_last", "repeated", "largest_unit"),
        *("device_free", "replay_margin", "outputs", "state_copies"),
    }
)
"""Names of facts that are bytes."""
_WANTING = frozenset({"fragmented", "combined", "other_pool"})
_COPY_WORDS = ("deepcopy", "ema_", "/ema", "ema.", "ref_model", "reference_model", "teacher")
_OUTPUTS = frozenset(
    {Category.LOGITS, Category.ACTIVATIONS, Category.UNKNOWN, Category.TEMPORARIES}
)
MAX_TOPS = 2


def snapshot_facts(found: SnapshotAnalysis, of_device: float | None = None) -> dict[str, Any]:
    """Return the facts of a snapshot; ``of_device``: this process's part of the device, 0 to 1."""
    focus = found.focus
    held = focus.allocated_bytes
    sure = held / max(focus.active_bytes, 1)
    if found.oom is not None and found.oom.verdict in _WANTING:
        sure *= focus.active_bytes / max(focus.reserved_bytes, 1)
    sure *= 1.0 if of_device is None else of_device
    waiting = focus.active_bytes - held
    return {
        "snapshot": True,
        "refused": found.oom is not None,
        "expandable": recorded_settings(found.settings).expandable_segments,
        "units": found.units or None,
        "held_waiting": waiting,
        "share_waiting": waiting / max(focus.active_bytes, 1),
        **filled_facts(focus.categories, focus.top_allocations, held=held, sure=sure),
        **_replay(found),
        **_space(found),
        **_growth(found),
        **_piles(found, held),
    }


def _piles(found: SnapshotAnalysis, held: int) -> dict[str, Any]:
    """What one piece of code piled up."""
    outputs, copies = found.kept_outputs, found.state_copies
    return {
        "outputs": outputs.bytes if outputs else None,
        "outputs_share": outputs.bytes / max(found.focus.reserved_bytes, 1) if outputs else 0.0,
        "outputs_blocks": outputs.blocks if outputs else 0,
        "outputs_passes": outputs.passes if outputs else 0,
        "state_copies": copies.bytes if copies else None,
        "state_copies_share": copies.bytes / max(held, 1) if copies else 0.0,
        "state_copies_blocks": copies.blocks if copies else 0,
        "state_copies_refused": copies is not None and copies.refused,
    }


def filled_facts(
    categories: Mapping[str, int],
    tops: tuple[TopAllocation, ...],
    *,
    held: int,
    sure: float = 1.0,
) -> dict[str, Any]:
    """Return what fills the memory: ``held`` bytes by category, and their largest allocations.

    ``sure``: the part of what is wanting that they may answer for.
    """
    values: dict[str, Any] = {"held": held, **_copies(tops), **_blocks(tops, held)}
    for group, members in GROUPS.items():
        values[f"held_{group}"] = sum(categories.get(c.value, 0) for c in members)
    unknown = values["held_unknown"]
    sure *= 1 - 0.5 * unknown / max(held, 1)
    for group in (*GROUPS, "copies"):
        size = values[f"held_{group}"]
        values[f"share_{group}"] = size / max(held, 1)
        values[f"part_{group}"] = sure * size / max(held - unknown, 1)
    values["leading"] = max(_CAUSES, key=lambda group: int(values[f"held_{group}"]))
    return values


def _copies(tops: Iterable[TopAllocation]) -> dict[str, Any]:
    size = sum(
        top.bytes
        for top in tops
        if any(word in frame.lower() for frame in top.frames for word in _COPY_WORDS)
    )
    return {"held_copies": size}


def _space(found: SnapshotAnalysis) -> dict[str, Any]:
    oom, space = found.oom, found.space
    reserved = max(found.focus.reserved_bytes, 1)
    private = [pool for pool in space.pools if pool.pool != (0, 0)]
    kept = sum(pool.reserved_bytes for pool in private)
    values: dict[str, Any] = {
        "private_reserved": kept,
        "private_reserved_share": kept / reserved,
        "pinned_free": space.pinned_free_bytes,
        "pinned_share": space.pinned_free_bytes / max(found.peak_reserved_bytes, 1),
    }
    if oom is None:
        return values
    whose = None
    if oom.elsewhere_bytes >= oom.requested_bytes and oom.verdict != "fitting":
        fitting = any(pool.largest_free_bytes >= oom.requested_bytes for pool in private)
        whose = "pool" if fitting and oom.pool == (0, 0) else "stream"
    return values | {
        "space": oom.verdict,
        "device_free": oom.device_free_bytes,
        "pieces": oom.free_bytes,
        "pieces_share": oom.free_bytes / reserved,
        "pieces_part": min(1.0, 0.25 + oom.free_bytes / reserved / 0.2),
        "largest_piece": oom.largest_free_bytes,
        "elsewhere": oom.elsewhere_bytes,
        "elsewhere_share": oom.elsewhere_bytes / reserved,
        "elsewhere_whose": whose,
    }


def _replay(found: SnapshotAnalysis) -> dict[str, Any]:
    answer = found.replay.of(EXPANDABLE) if found.replay is not None else None
    if found.replay is None or answer is None or answer.margin_bytes is None:
        return {"replay_expandable": answer.outcome if answer is not None else None}
    return {
        "replay_expandable": answer.outcome,
        "replay_margin": abs(answer.margin_bytes),
        "replay_margin_share": answer.margin_bytes / max(found.replay.capacity_bytes, 1),
    }


def _growth(found: SnapshotAnalysis) -> dict[str, Any]:
    growth = found.growth
    if growth is None or not growth.leaking:
        return {"kept_per_step": None}
    starts = growth.start_allocated_bytes
    return {
        "kept_per_step": growth.per_step_bytes,
        "kept": starts[-1] - starts[1],
        "kept_steps": len(starts),
        "kept_first": starts[1],
        "kept_first_step": growth.steps[1],
        "kept_last": starts[-1],
        "kept_last_step": growth.steps[-1],
    }


def _blocks(tops: tuple[TopAllocation, ...], held: int) -> dict[str, Any]:
    """What single pieces of code hold: kept outputs, the largest gathered unit."""
    outputs = [top for top in tops if top.category in _OUTPUTS and top.phase is not Phase.WRAP]
    most = max(outputs, key=lambda top: top.bytes if top.count >= 4 else 0, default=None)
    gathered = [
        top.bytes // max(top.count, 1) for top in tops if top.category in GROUPS["gathered"]
    ]
    largest = max(gathered, default=0)
    return {
        "repeated_blocks": most.count if most is not None else 0,
        "repeated": most.bytes if most is not None else 0,
        "largest_unit": largest,
        "largest_unit_share": largest / max(held, 1),
        "whole_gradient_blocks": sum(
            top.count for top in tops if top.category is Category.UNSHARDED_GRADIENTS
        ),
    }


def snapshot_details(found: SnapshotAnalysis) -> dict[str, tuple[Evidence, ...]]:
    """Return, by cause, the allocations and segments that its evidence rests on."""
    details = top_details(found.focus.top_allocations, found.path, found.rank)
    details["fragmentation"] = tuple(
        _evidence(
            found,
            f"segment of {format_bytes(p.size_bytes)} held by {p.blocks} blocks, the largest "
            f"{named(p.pinned_by)}",
            p.free_bytes,
        )
        for p in found.space.pinned[:MAX_TOPS]
    )
    if found.growth is not None and found.growth.leaking:
        details["leak"] = tuple(
            _evidence(found, f"kept: {named(top)}", top.bytes) for top in found.growth.suspects[:3]
        )
    return details


def top_details(
    tops: tuple[TopAllocation, ...], file: str | None, rank: int | None
) -> dict[str, tuple[Evidence, ...]]:
    """Return the largest allocations behind each cause that fills the memory."""
    return {
        cause: tuple(
            Evidence(text=named(top), file=file, rank=rank, bytes=top.bytes)
            for top in [top for top in tops if top.category in GROUPS[group]][:MAX_TOPS]
        )
        for group, cause in _CAUSES.items()
    }


def _evidence(found: SnapshotAnalysis, text: str, size: int) -> Evidence:
    return Evidence(text=text, file=found.path, rank=found.rank, bytes=size)
