"""Traces of allocations, and what an allocator counts while it plays one. Standard library only."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POINTS = 200
"""Moments, evenly spread over a trace, at which reserved bytes are read."""
UNIT = 2 << 20
"""Everything that is reserved is a multiple of this."""

Event = list[int] | int
"""[bytes, stream] for a new block; the number of the block (in order of birth) that is freed."""


@dataclass(slots=True)
class Outcome:
    """What an allocator counted while it played a trace."""

    peak: int = 0
    last: int = 0
    allocated_peak: int = 0
    device_allocations: int = 0
    """``cudaMalloc``, or mappings of an expandable segment."""
    retries: int = 0
    failed_at: int | None = None
    """Index of the event that ran out of memory; None: played to the end."""
    over_time: list[int] = field(default_factory=list)
    """Reserved memory at POINTS moments, in UNITs."""


def moments(events: Sequence[Event]) -> set[int]:
    """Return after which events reserved bytes are read."""
    last = len(events) - 1
    return {last * (point + 1) // POINTS for point in range(POINTS)}


def name_of(path: Path) -> str:
    """Return the name of a trace."""
    return path.name.partition(".")[0]


def read(path: Path) -> dict[str, Any]:
    """Read a trace with its cases."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found
