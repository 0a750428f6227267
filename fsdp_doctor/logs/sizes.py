"""Sizes in messages, as exact integers."""

from __future__ import annotations

import re

SIZE = r"(\d[\d,]*(?:\.\d+)?) ?(bytes|[KMGTPE]i?B)"
"""Two groups: number and unit. torch prints at most two decimals (c10/util/... format_size in
CUDACachingAllocator.cpp: ``bytes``, KiB, MiB, GiB)."""

_FACTORS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "p": 1 << 50}
_FACTORS["e"] = 1 << 60
ABSURD = 1 << 50
"""No device or process has a PiB; NVML's "not available" prints as 16 EiB."""


def size_bytes(number: str, unit: str) -> int:
    """Return bytes of ``2.00`` ``GiB``. Units are binary, ``GB`` too (torch, Ray, DeepSpeed)."""
    factor = _FACTORS.get(unit[0].lower(), 1)
    digits = number.replace(",", "")
    whole, _, part = digits.partition(".")
    if not part:
        return int(whole) * factor
    scale = int("1" + "0" * len(part))
    return (int(whole + part) * factor * 2 + scale) // (2 * scale)


def sane(value: int | None) -> int | None:
    """Return a size, or None for one that no machine has."""
    return value if value is not None and 0 <= value < ABSURD else None


_TEXT = re.compile(SIZE)


def parse_size(text: str) -> int | None:
    """Return the bytes of a text that begins with a size, or None."""
    found = _TEXT.match(text.strip())
    return size_bytes(*found.groups()) if found else None
