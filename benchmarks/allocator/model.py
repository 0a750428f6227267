"""Play traces through the model of the allocator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from traces import UNIT, Event, Outcome, moments

from fsdp_doctor.memory.allocator_conf import parse_alloc_conf
from fsdp_doctor.memory.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    OutOfMemoryModelled,
)
from fsdp_doctor.memory.expandable_segments import make_allocator

ROOM = 1 << 40
"""Addresses between two places for a segment; more than any segment has bytes."""


class Shuffled(CachingAllocator):
    """Takes its segments at addresses in no order."""

    def __init__(self, settings: AllocatorSettings, seed: int) -> None:
        super().__init__(settings)
        self._places = list(range(1, 10_000))
        random.Random(seed).shuffle(self._places)  # noqa: S311 (no secret)

    def _new_address(self, size: int) -> int:  # noqa: ARG002
        return self._places.pop() * ROOM


def play_on_model(
    events: Sequence[Event], conf: str, limit: int | None, seed: int | None = None
) -> Outcome:
    """Play a trace. ``seed``: with segments in an order of addresses of its own.

    Expandable segments have one range for each pool, so no order.
    """
    settings = replace(parse_alloc_conf(conf), capacity_bytes=limit)
    allocator = make_allocator(settings)
    if seed is not None and not settings.expandable_segments:
        allocator = Shuffled(settings, seed)
    blocks: list[Any] = []
    outcome, at = Outcome(), moments(events)
    for index, event in enumerate(events):
        if isinstance(event, int):
            allocator.free(blocks[event])
        else:
            try:
                blocks.append(allocator.allocate(*event))
            except OutOfMemoryModelled:
                outcome.failed_at = index
                break
            outcome.peak = max(outcome.peak, allocator.reserved_bytes)
            outcome.allocated_peak = max(outcome.allocated_peak, allocator.allocated_bytes)
        if index in at:
            outcome.over_time.append(allocator.reserved_bytes // UNIT)
    outcome.last, outcome.retries = allocator.reserved_bytes, allocator.retries
    outcome.device_allocations = allocator.segment_allocations
    return outcome
