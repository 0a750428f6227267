"""What other allocator settings would have made of a recorded trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The trace up to the refused request, replayed with one setting changed."""

    setting: str
    """As in ``PYTORCH_CUDA_ALLOC_CONF``; ``as it ran``: nothing changed."""
    outcome: Literal["fits", "fails", "unknown"]
    """Whether every request up to the refused one, and that one, is served."""
    margin_bytes: int | None
    """What was left after the refused request was served, cached memory counted as left; below 0:
    what was missing."""
    peak_reserved_bytes: int | None
    reason: str = ""
    """Why it is unknown, or where it failed if not at the refused request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorReplay:
    """Answers for one snapshot whose request was refused."""

    capacity_bytes: int
    """What this process could reserve when the request was refused."""
    capacity_is_least: bool
    """Whether a limit of unknown size applied: the process could reserve at least that much."""
    floor_bytes: int
    """Blocks in use and the refused request: no setting can do with less."""
    events: int
    """Trace entries replayed."""
    assumed_bytes: int
    """Blocks older than the replay, which are laid side by side where their place would differ."""
    rest_of_step_bytes: int | None
    """What the fullest complete step had at its peak beyond the memory at the refused request: a
    served request does not mean a finished step. None where no step was completed."""
    changes: tuple[WhatIf, ...]
    """``as it ran`` first."""

    def of(self, setting: str) -> WhatIf | None:
        """Return the answer for a setting."""
        return next((one for one in self.changes if one.setting == setting), None)
