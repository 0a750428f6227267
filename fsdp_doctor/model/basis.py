"""What the numbers of a comparison rest on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """One launch of a side, and what of it was used."""

    label: str
    """``A1``: the first launch of A."""
    name: str
    place: str
    """The end of the path of the run directory, or of the log."""
    created: str
    source: str
    status: str
    used: bool
    """Whether its numbers are in the metrics; a launch that failed is left out where others of its
    side completed."""
    ranks: int
    timed_steps: int
    memory_steps: int
    """Steps behind the memory of steady state."""
    memory_kind: str | None
    """Their kind: timed, or observed."""
    log_lines: dict[str, int] = field(default_factory=dict)
    """Of a job's log: lines read, by kind."""
    log_places: tuple[str, ...] = ()
    """Where they stand: ``job.log:853-989 megatron iteration``."""
