"""Allocations in a few words, for evidence."""

from __future__ import annotations

from fsdp_doctor.model.memory import TopAllocation


def place_of(frames: tuple[str, ...]) -> str | None:
    """Who asked: the innermost frame, and the innermost of the user's own where that differs."""
    if not frames:
        return None
    own = next((frame for frame in frames if not frame.startswith("torch/")), None)
    return frames[0] if own in (None, frames[0]) else f"{frames[0]} < {own}"


def named(top: TopAllocation) -> str:
    """Return an allocation in a few words."""
    what = top.category.value.replace("_", " ")
    place = top.module or place_of(top.frames) or top.operator
    count = f"{top.count} blocks of " if top.count > 1 else ""
    return f"{count}{what}" + (f", {place}" if place else "")
