"""What the command asks the child process, and what that answers. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_doctor.model.estimate import RankEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunRequest:
    """What the child process is asked."""

    spec: dict[str, Any]
    rank: int
    steps: int
    workspace_bytes: int
    capacities: tuple[int, ...] = ()
    expandable_segments: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunAnswer:
    """What it answers: an estimate, or why there is none."""

    estimate: RankEstimate | None = None
    input_error: str | None = None
    """The text of an InputError of the user's making."""
