"""What two sides of a comparison do not have in common besides their configs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One difference, and what the comparison still means."""

    what: str
    """device_type, device_name, world_size, source, tokens_per_step or model."""
    a: str
    b: str
    meaning: str
    refused: tuple[str, ...] = ()
    """Names of the metrics that have no verdict for it."""
    refused_of_ranks: tuple[str, ...] = ()
    """Names of those whose rows of single ranks have none."""
    refused_over_ranks: tuple[str, ...] = ()
    """Names of those whose rows over all ranks have none."""
    known: bool = True
    """Whether both sides know their value; else the verdict is not refused but not firm either."""

    @property
    def text(self) -> str:
        """The difference and what it means, in one sentence."""
        return f"{self.what} differs ({self.a} -> {self.b}): {self.meaning}"
