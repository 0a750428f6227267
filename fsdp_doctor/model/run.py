"""A run: one execution of a training job, as recorded per rank and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fsdp_doctor.model.config import ConfigValue
from fsdp_doctor.model.memory import Anatomy, MemoryCounters, Phase

RunStatus = Literal["running", "completed", "failed", "interrupted"]
RunSource = Literal["real_ranks", "one_rank", "simulated", "recorded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a run ended that did not complete."""

    kind: str
    """device_oom, signal, exception, hang, interrupted, launch, no_space."""
    message: str
    rank: int | None = None
    """First failing rank, or None when not known."""
    step: int | None = None
    phase: Phase | None = None
    signal: int | None = None
    exit_code: int | None = None
    frames: tuple[str, ...] = ()
    """Python frames of the failing rank, innermost first."""
    requested_bytes: int | None = None
    victims: tuple[int, ...] = ()
    """Ranks that died because this one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of the trained model, counted from its parameters before wrapping."""

    parameters: int
    """Number of trainable elements (a tied weight counts once)."""
    parameter_bytes: int
    """Bytes of the parameters in the dtype they were built in."""
    buffers_bytes: int = 0
    unit_parameters: tuple[int, ...] = ()
    """Elements of each wrap unit (FSDP), the root's own first; empty: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest:
    """``run.json``: everything about a run that is not a time series."""

    schema: int
    name: str
    tool_version: str
    created: str
    """ISO 8601, UTC."""
    status: RunStatus
    source: RunSource
    world_size: int
    ranks: tuple[int, ...]
    """Ranks that are recorded here (one with ``--one-rank-of``)."""
    device_type: Literal["cuda", "cpu"]
    device_name: str | None = None
    spec: dict[str, Any] | None = None
    """The spec as written (redacted), or None for a run of the user's own loop."""
    effective_config: dict[str, ConfigValue] = field(default_factory=dict)
    sizes: ModelSizes | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    tokens_per_step: int | None = None
    """Over all ranks and micro steps."""
    failure: Failure | None = None
    warnings: tuple[str, ...] = ()
    log_lines: dict[str, int] = field(default_factory=dict)
    """Of a job's log: lines read, by kind."""
    log_places: tuple[str, ...] = ()
    """Where they stand: ``job.log:853-989 megatron iteration``."""
    memory_resolution_bytes: int = 1
    """Bytes to which the memory numbers are rounded (logs print two decimals of GiB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """One phase of one step on one rank."""

    step: int
    """-1: set-up (init, wrap), -2: outside of steps, after the first."""
    phase: Phase
    microbatch: int = 0
    end: MemoryCounters = field(default_factory=MemoryCounters)
    peak: MemoryCounters = field(default_factory=MemoryCounters)
    time_s: float | None = None
    """Duration: by CUDA events in a step on a GPU, else by the host clock. Known one step late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step on one rank."""

    step: int
    kind: Literal["observed", "warmup", "timed", "checkpoint", "kernel_profile"]
    """Only ``timed`` steps carry times that mean anything."""
    phases: tuple[PhaseRecord, ...] = ()
    step_time_s: float | None = None
    gap_s: float | None = None
    """From the end of the step before to the start of this one, by the host clock: what the loop
    does between steps (waiting for data, evaluation)."""
    loss: float | None = None
    """None: not known (one-rank runs have no meaningful loss)."""
    loss_finite: bool | None = None
    allocation_retries: int | None = None
    """Cumulative, as ``num_alloc_retries``."""
    out_of_memory_count: int | None = None
    """Cumulative, as ``num_ooms``."""
    device_used_bytes: int | None = None
    """Used memory of the whole device, all processes (NVML or ``cudaMemGetInfo``)."""
    host_rss_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBreakdown:
    """Where the time of one profiled step went, in one phase, on one rank (seconds)."""

    phase: Phase
    wall_s: float
    kernel_s: float
    """Union of compute kernels (CPU: operators)."""
    exposed_communication_s: float
    """Communication not covered by compute."""
    communication_s: float
    copy_s: float
    """Memory copies and sets not covered by compute."""
    idle_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """What a save and a load did on one rank; its memory is in the phases of its step."""

    format: str
    bytes_on_disk: int
    """Of all ranks together."""
    save_s: float
    load_s: float
    restored: bool | None
    """Whether the loaded parameters equal the saved ones; None: only a part was on this rank."""
    host_before_bytes: int | None = None
    """Resident set of the process when the save began."""
    save_host_peak_bytes: int | None = None
    """Largest resident set while saving, of this process alone."""
    load_host_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeries:
    """What one rank recorded."""

    rank: int
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    device: str | None = None
    setup: tuple[PhaseRecord, ...] = ()
    outside: tuple[PhaseRecord, ...] = ()
    """Phases between steps (evaluation, a checkpoint), in their order."""
    steps: Sequence[StepRecord] = ()
    """A tuple, or columns that build the records when asked (``runs.columns``)."""
    anatomy: Anatomy | None = None
    time_breakdown: tuple[TimeBreakdown, ...] = ()
    checkpoint: CheckpointRecord | None = None
    """None: none was saved and loaded, or not to its end."""
    finished: bool = False
    """Whether the rank wrote its end record."""
    exit_code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run directory, read."""

    manifest: RunManifest
    ranks: tuple[RankSeries, ...]
    directory: Path | None = None
