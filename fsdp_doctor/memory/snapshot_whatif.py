"""Would other allocator settings have served the request that was refused?

The trace, up to the refused request, is fed to the model of the caching allocator
(``caching_allocator``). Blocks older than the trace start where they lay; under settings that
would have placed them otherwise they are laid side by side, which flatters those settings a little:
how many bytes that concerns is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fsdp_doctor.errors import InputError
from fsdp_doctor.memory.allocator_conf import parse_alloc_conf
from fsdp_doctor.memory.caching_allocator import (
    SMALL_SEGMENT,
    AllocatorSettings,
    Block,
    CachingAllocator,
    OutOfMemoryModelled,
)
from fsdp_doctor.memory.expandable_segments import make_allocator
from fsdp_doctor.memory.snapshot_replay import BEFORE
from fsdp_doctor.memory.snapshot_space import driver_bytes, ranges_at
from fsdp_doctor.memory.snapshot_view import View
from fsdp_doctor.model.replay import AllocatorReplay, WhatIf
from fsdp_doctor.model.snapshot import OomEvent

AS_IT_RAN = "as it ran"
EXPANDABLE = "expandable_segments:True"
MAX_EVENTS = 100_000
"""Trace entries that are replayed: the last ones before the refused request."""
MUCH = 0.6
"""With this share of the memory older than the replay, nothing is said of another layout."""
MAX_RETRIES = 1000
"""A setting under which cached memory is given back that often is of no use, and slow to replay."""
_POOL = 1 << 20
"""Streams of private pools get numbers apart."""


@dataclass(frozen=True, slots=True)
class _Story:
    """The blocks of a window in the order of their events."""

    events: list[int]
    """Block index + 1: allocated; -(index + 1): given back."""
    requested: list[int]
    stream: list[int]
    older: list[int]
    """Indexes of the blocks that are there when the window begins, by address."""
    request: int
    request_stream: int


def replay_settings(view: View, oom: OomEvent, limit_bytes: int | None = None) -> AllocatorReplay:
    """Replay the trace of a device whose request ``oom`` was refused, under several settings.

    ``limit_bytes``: what the process might reserve, where a message tells.
    """
    at = int(view.replay.trace.where("oom")[-1])
    begin = max(at - MAX_EVENTS, 0)
    story = _story(view, begin, at)
    recorded = recorded_settings(view.snapshot.settings)
    capacity, least = _capacity(view, at, oom, limit_bytes)
    recorded = replace(recorded, capacity_bytes=capacity)
    sizes = view.replay.blocks.size + view.replay.blocks.rest
    assumed = int(sizes[story.older].sum()) if story.older else 0
    held = int(view.replay.active[at])
    unsure = assumed > MUCH * held
    changes = [_outcome(view, story, recorded, AS_IT_RAN, begin)]
    if changes[0].outcome == "fits":
        changes[0] = replace(
            changes[0], outcome="unknown", reason="the model serves it: it leaves something out"
        )
    for name, settings in variants(recorded):
        changed = recorded.expandable_segments != settings.expandable_segments
        if changed and unsure:
            reason = "the trace begins too late: most blocks are older"
            changes.append(_unknown(name, reason))
        elif changes[0].outcome == "unknown":
            changes.append(_unknown(name, "the model does not refuse what was refused"))
        else:
            answer = _outcome(view, story, settings, name, begin)
            if least and answer.outcome == "fails":
                most = replace(settings, capacity_bytes=capacity + oom.driver_bytes - 1)
                if _outcome(view, story, most, name, begin).outcome == "fits":
                    answer = _unknown(name, "it hangs on the exact limit of the process")
            changes.append(answer)
    return AllocatorReplay(
        capacity_bytes=capacity,
        capacity_is_least=least,
        floor_bytes=held + oom.requested_bytes,
        events=at - begin,
        assumed_bytes=assumed,
        rest_of_step_bytes=_rest_of_step(view, at),
        changes=tuple(changes),
    )


def _unknown(name: str, reason: str) -> WhatIf:
    return WhatIf(
        setting=name, outcome="unknown", margin_bytes=None, peak_reserved_bytes=None, reason=reason
    )


def recorded_settings(settings: Mapping[str, object]) -> AllocatorSettings:
    """Return the allocator settings that a snapshot tells (torch 2.1 and later)."""
    try:
        text = str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
        written = parse_alloc_conf(text, "PYTORCH_CUDA_ALLOC_CONF")
    except InputError:  # something that is not modelled: what the other keys tell
        written = AllocatorSettings()
    split = settings.get("max_split_size", -1)
    if isinstance(split, int) and 0 < split < 1 << 50:
        written = replace(written, max_split_size_bytes=split)
    collect = settings.get("garbage_collection_threshold", 0.0)
    if isinstance(collect, float) and 0 < collect < 1:
        written = replace(written, garbage_collection_threshold=collect)
    if settings.get("expandable_segments"):
        written = replace(written, expandable_segments=True)
    return written


def variants(recorded: AllocatorSettings) -> list[tuple[str, AllocatorSettings]]:
    """Return the settings worth trying beside the recorded ones."""
    found = []
    if not recorded.expandable_segments:
        found.append(
            (EXPANDABLE, replace(recorded, expandable_segments=True, max_split_size_bytes=None))
        )
    if recorded.max_split_size_bytes is not None:
        found.append(("max_split_size_mb unset", replace(recorded, max_split_size_bytes=None)))
    else:
        limited = replace(recorded, max_split_size_bytes=128 << 20)
        found.append(("max_split_size_mb:128", limited))
    if recorded.roundup_power2_divisions <= 1:
        rounding = replace(recorded, roundup_power2_divisions=4)
        found.append(("roundup_power2_divisions:4", rounding))
    if not recorded.garbage_collection_threshold:
        collecting = replace(recorded, garbage_collection_threshold=0.8)
        found.append(("garbage_collection_threshold:0.8", collecting))
    return found


def _capacity(view: View, at: int, oom: OomEvent, limit_bytes: int | None) -> tuple[int, bool]:
    """Return what the process could reserve, and whether that is only known to be the least."""
    reserved, free = int(view.replay.reserved[at]), oom.device_free_bytes or 0
    asked = driver_bytes(oom.requested_bytes)
    if free < asked:
        return reserved + free, False
    if limit_bytes is None or abs(limit_bytes - reserved) > asked:
        return reserved, True
    return min(max(limit_bytes, reserved), reserved + asked - SMALL_SEGMENT), False


def _rest_of_step(view: View, at: int) -> int | None:
    peaks = [step.peak_allocated_bytes for step in view.steps() if step.complete]
    return max(max(peaks) - int(view.replay.allocated[at]), 0) if peaks else None


def _story(view: View, begin: int, at: int) -> _Story:
    blocks, trace = view.replay.blocks, view.replay.trace
    older = np.flatnonzero((blocks.born < begin) & (blocks.completed >= begin))
    older = older[np.argsort(blocks.addr[older], kind="stable")]
    born = np.flatnonzero((blocks.born >= begin) & (blocks.born < at))
    gone = np.flatnonzero(
        (blocks.completed >= begin) & (blocks.completed < at) & (blocks.completed != BEFORE)
    )
    where = np.concatenate([blocks.born[born] * 2 + 1, blocks.completed[gone] * 2])
    what = np.concatenate([born + 1, -(gone + 1)])
    stream = blocks.stream + blocks.pool * _POOL
    return _Story(
        events=what[np.argsort(where, kind="stable")].tolist(),
        requested=blocks.requested.tolist(),
        stream=stream.tolist(),
        older=older.tolist(),
        request=int(trace.size[at]),
        request_stream=int(trace.stream[at]) + int(trace.pool[at]) * _POOL,
    )


def _outcome(
    view: View, story: _Story, settings: AllocatorSettings, name: str, begin: int
) -> WhatIf:
    allocator = make_allocator(settings)
    held: dict[int, Block] = {}
    peak = 0
    entry = -1
    try:
        _lay_out(view, story, allocator, held, begin)
        for entry, event in enumerate(story.events):  # noqa: B007 (told when refused)
            if event < 0:
                block = held.pop(-event - 1, None)
                if block is not None:
                    allocator.free(block)
                continue
            index = event - 1
            held[index] = allocator.allocate(story.requested[index], story.stream[index])
            peak = max(peak, allocator.reserved_bytes)
            if allocator.retries > MAX_RETRIES:
                return _unknown(name, "it would give memory back again and again")
        entry = len(story.events)
        allocator.allocate(story.request, story.request_stream)
    except OutOfMemoryModelled as refused:
        missing = allocator.reserved_bytes + driver_bytes(refused.requested_bytes)
        early = "" if entry == len(story.events) else f"already at entry {entry} of the replay"
        return WhatIf(
            setting=name,
            outcome="fails",
            margin_bytes=min((settings.capacity_bytes or 0) - missing, -1),
            peak_reserved_bytes=max(peak, allocator.reserved_bytes),
            reason=early,
        )
    left = (settings.capacity_bytes or 0) - allocator.reserved_bytes
    return WhatIf(
        setting=name,
        outcome="fits",
        margin_bytes=left + allocator.releasable_bytes(),
        peak_reserved_bytes=max(peak, allocator.reserved_bytes),
    )


def _lay_out(
    view: View, story: _Story, allocator: CachingAllocator, held: dict[int, Block], begin: int
) -> None:
    """Put the blocks that are older than the replay where they lay, or side by side."""
    recorded = recorded_settings(view.snapshot.settings).expandable_segments
    if allocator.settings.expandable_segments or recorded:
        for index in story.older:
            held[index] = allocator.allocate(story.requested[index], story.stream[index])
        return
    blocks = view.replay.blocks
    ranges = ranges_at(view.snapshot, view.replay, begin)
    for r in sorted(ranges, key=lambda r: -r.address):
        inside = r.blocks.tolist() if r.blocks is not None else []
        inside.sort(key=lambda index: int(blocks.addr[index]))
        pieces: list[tuple[int, int, bool]] = []
        owners: list[int] = []
        position = r.address
        for index in inside:
            address = int(blocks.addr[index])
            size = int(blocks.size[index] + blocks.rest[index])
            if address < position or address + size > r.end:
                continue
            if address > position:
                pieces.append((address - position, 0, False))
                owners.append(-1)
            pieces.append((size, story.requested[index], True))
            owners.append(index)
            position = address + size
        if position < r.end:
            pieces.append((r.end - position, 0, False))
            owners.append(-1)
        placed = allocator.adopt(r.size, r.stream + r.pool * _POOL, pieces)
        held.update((o, block) for o, block in zip(owners, placed, strict=True) if o >= 0)
