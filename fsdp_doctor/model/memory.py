"""Words for memory: phases, categories, counters, and the anatomy of a peak."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """What a training process is doing when memory moves or time passes."""

    INIT = "init"
    LOAD = "load"
    WRAP = "wrap"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    CHECKPOINT_SAVE = "checkpoint_save"
    CHECKPOINT_LOAD = "checkpoint_load"
    EVALUATION = "evaluation"
    GENERATION = "generation"
    GRAPH_CAPTURE = "graph_capture"
    UNKNOWN = "unknown"


class Category(StrEnum):
    """What a block of memory holds."""

    PARAMETERS = "parameters"
    """Parameters as the rank keeps them between steps (sharded or replicated)."""
    UNSHARDED_PARAMETERS = "unsharded_parameters"
    """Parameters gathered for compute, and low-precision copies made for it."""
    GRADIENTS = "gradients"
    """Gradients as the optimizer reads them (sharded or replicated)."""
    UNSHARDED_GRADIENTS = "unsharded_gradients"
    """Whole gradients before reduction, or accumulated whole without synchronisation."""
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATIONS = "activations"
    """Tensors saved by forward for backward."""
    COMMUNICATION = "communication"
    """All-gather and reduce-scatter buffers, DDP buckets."""
    LOGITS = "logits"
    """Output of the vocabulary projection and what the loss derives from it."""
    TEMPORARIES = "temporaries"
    """Born in backward or in the optimizer and gone soon after; also scratch of forward."""
    INPUTS = "inputs"
    BUFFERS = "buffers"
    UNKNOWN = "unknown"
    ROUNDING = "rounding"
    """Allocated by the caching allocator beyond what was asked for (unsplit rest of a block)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCounters:
    """Counters of one device at one moment, in bytes; None where the device has no such counter.

    Source: ``torch.cuda.memory_stats`` (``allocated_bytes.all``, ``reserved_bytes.all``,
    ``active_bytes.all``, ``requested_bytes.all``).
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    active_bytes: int | None = None
    requested_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopAllocation:
    """Blocks alive at the peak that were asked for by the same code."""

    bytes: int
    """Sum over the ``count`` blocks, rounded as the allocator rounds."""
    count: int
    category: Category
    subcategory: str | None = None
    phase: Phase
    """Phase in which the blocks were allocated."""
    step: int | None = None
    module: str | None = None
    """Dotted module path, e.g. ``blocks.3.attention``, where known."""
    operator: str | None = None
    """Dispatcher name, e.g. ``aten.mm.default``, where known."""
    frames: tuple[str, ...] = ()
    """Python frames, innermost first, as ``file:line function``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseAnatomy:
    """Memory of one phase of the observed step."""

    peak_allocated_bytes: int
    end_allocated_bytes: int
    categories: dict[str, int] = field(default_factory=dict)
    """Category -> bytes at the moment of this phase's peak; sums to ``peak_allocated_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """What filled a rank's device during one observed step."""

    step: int
    source: str
    """``cuda_history``, ``cpu_tracker`` or ``fake``."""
    peak_phase: Phase
    peak_allocated_bytes: int
    categories: dict[str, int]
    """Category -> bytes at the moment of the step's peak; sums to ``peak_allocated_bytes``."""
    phases: dict[str, PhaseAnatomy]
    """Phases of the observed step, and ``init``, ``wrap`` of the set-up where seen."""
    resident: dict[str, int]
    """Category -> bytes at the end of the step; empty for a step that an exception ended."""
    top_allocations: tuple[TopAllocation, ...] = ()
    expected_bytes: dict[str, int] = field(default_factory=dict)
    """parameters, gradients, optimizer_state: counted from the tensors' shapes, rounded per tensor
    as the allocator rounds (512 bytes on CUDA, none on CPU)."""
    events: int = 0
    """Allocations and frees seen since observation began."""
    incomplete: str | None = None
    """Why the record is not whole (e.g. history ring overflowed), or None."""
