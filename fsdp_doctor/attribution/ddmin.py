"""Delta debugging: the fewest changes that make something fail (Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_doctor.attribution.design import Point

Fails = Callable[[Point], bool | None]
"""Whether A with these changes fails; None: it cannot be told."""


def ddmin(changes: Point, fails: Fails) -> Point:
    """Return a 1-minimal failing set: without any one of its changes it does not fail, or that
    cannot be told.

    ``changes`` as a whole fail. At most about k^2 tests for k changes, 2 log k when one is guilty.
    """
    current = sorted(changes)
    parts = 2
    while len(current) >= 2:
        chunks = _chunks(current, parts)
        smaller = next((c for c in chunks if fails(frozenset(c)) is True), None)
        if smaller is not None:
            current, parts = smaller, 2
            continue
        rests = [_without(current, c) for c in chunks] if parts > 2 else []
        rest = next((r for r in rests if fails(r) is True), None)
        if rest is not None:
            current, parts = sorted(rest), max(parts - 1, 2)
            continue
        if parts >= len(current):
            break
        parts = min(2 * parts, len(current))
    return frozenset(current)


def _without(items: list[int], chunk: list[int]) -> Point:
    return frozenset(items) - frozenset(chunk)


def _chunks(items: list[int], parts: int) -> list[list[int]]:
    size, extra = divmod(len(items), parts)
    found, start = [], 0
    for number in range(parts):
        end = start + size + (number < extra)
        found.append(items[start:end])
        start = end
    return [chunk for chunk in found if chunk]
