"""What the command asks the child process, and what that answers. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
    alloc_conf: str = ""
    """``PYTORCH_CUDA_ALLOC_CONF`` of the job."""
    every_layer: bool = False
    """Simulate all layers, also where a few would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunAnswer:
    """What it answers: an estimate, or why there is none."""

    estimate: RankEstimate | None = None
    input_error: str | None = None
    """The text of an InputError of the user's making."""
    failure: str | None = None
    """Why the dry run broke off, in one line; only where a server asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a server of dry runs is asked: the rank of a job on GPUs, or on CPUs."""

    device: Literal["cuda", "cpu"]
    request: DryRunRequest
