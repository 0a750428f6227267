"""The category of a block: identity first, then mechanism, then when and where it lived."""

from __future__ import annotations

from fsdp_doctor.memory.events import Allocation, EventLog, Label
from fsdp_doctor.memory.mechanisms import REDUCED, builds_module, by_frames
from fsdp_doctor.model.memory import Category, Phase

HEAD_NAMES = frozenset({"head", "lm_head", "output", "output_layer", "embed_out", "unembed"})
"""Last part of the module path of the vocabulary projection: the built-in GPT, Hugging Face,
torchtitan, Megatron, GPT-NeoX."""

CUBLAS_WORKSPACES = frozenset(
    {8_519_680, 33_554_432, 67_108_864, 4_194_304, 1_048_576, 134_217_728}
)
"""Bytes of one cuBLAS or cuBLASLt workspace (``aten/src/ATen/cuda/CublasHandlePool.cpp``: 8320 KiB
before Hopper, 32 MiB on it; others by ``CUBLAS_WORKSPACE_CONFIG``)."""

_ENGINE = frozenset({Category.COMMUNICATION, Category.UNSHARDED_PARAMETERS})
_SETUP = frozenset({Phase.INIT, Phase.LOAD, Phase.WRAP})

Verdict = tuple[Category, str | None]


def classify(allocation: Allocation, log: EventLog) -> Verdict:
    """Category and subcategory of ``allocation``. ``unknown`` when nothing says anything.

    Its ``module`` is corrected on the way, where the memory is another module's than the running.
    """
    known = _known(allocation, log)
    if known is not None:
        return known.category, known.subcategory
    if allocation.phase in _SETUP:
        return _setup(allocation, log)
    if allocation.region == "loss":
        return Category.LOGITS, "loss"
    if _outlives_step(allocation, log):
        return _persistent(allocation)
    return _by_phase(allocation, log)


def _known(allocation: Allocation, log: EventLog) -> Label | None:
    """What the tensor's holder or the code that made it says."""
    known = allocation.label or allocation.hint
    if known is not None:
        if known.module is not None:
            allocation.module = known.module
        return known
    known = by_frames(allocation.frames)
    if known is not None and known.category in _ENGINE:
        # engines prefetch: the module that runs is not the one the memory is for
        allocation.module = None
        if known == REDUCED and _outlives_backward(allocation, log):
            return Label(Category.GRADIENTS)
    return known


def _setup(allocation: Allocation, log: EventLog) -> Verdict:
    """What set-up leaves behind is labelled; what dies in its own phase was scratch.

    The rest was built in one phase and given up in a later one: whole parameters before sharding.
    """
    end = max(
        (
            log.position if span.end is None else span.end
            for span in log.phases
            if span.phase is allocation.phase
        ),
        default=0,
    )
    if allocation.died is None:
        if builds_module(allocation.frames):
            return Category.PARAMETERS, None
        return Category.UNKNOWN, None
    if allocation.died < end:
        return Category.TEMPORARIES, "setup"
    return Category.PARAMETERS, "before_sharding"


def _outlives_step(allocation: Allocation, log: EventLog) -> bool:
    """Whether it is alive when the forward of a later step begins."""
    for span in log.phases:
        if span.step > allocation.step and span.phase is Phase.FORWARD:
            return allocation.alive_at(span.begin)
    return False


def _persistent(allocation: Allocation) -> Verdict:
    """Born in a step, unlabelled, never freed: a library's workspace, or a cache of the model."""
    if allocation.phase is Phase.UNKNOWN and not allocation.frames:
        return Category.UNKNOWN, "older_than_history"
    if allocation.requested_bytes in CUBLAS_WORKSPACES:
        return Category.TEMPORARIES, "cublas_workspace"
    return Category.UNKNOWN, "persistent"


def _by_phase(allocation: Allocation, log: EventLog) -> Verdict:
    """What a block that its step outlives can be, by the phase it was born in."""
    if allocation.phase is Phase.DATA:
        return Category.INPUTS, None
    if allocation.phase in (Phase.FORWARD, Phase.EVALUATION):
        return _forward(allocation, log)
    if allocation.phase is Phase.BACKWARD:
        return _backward(allocation, log)
    if allocation.phase is Phase.UNKNOWN:
        return Category.UNKNOWN, None
    return Category.TEMPORARIES, None


def _forward(allocation: Allocation, log: EventLog) -> Verdict:
    if allocation.module is not None and is_head(allocation.module, log):
        return Category.LOGITS, None
    if _freed_in_scope(allocation, log):
        return Category.TEMPORARIES, None
    return Category.ACTIVATIONS, None


def _backward(allocation: Allocation, log: EventLog) -> Verdict:
    if _outlives_backward(allocation, log):
        return Category.GRADIENTS, None
    if allocation.region == "loss_backward":
        # without module calls in the log every moment of backward looks like this
        return (Category.LOGITS, "gradient") if log.scopes else (Category.TEMPORARIES, None)
    if allocation.region == "recompute" and not _freed_in_scope(allocation, log):
        return Category.ACTIVATIONS, "recomputed"
    return Category.TEMPORARIES, None


def _outlives_backward(allocation: Allocation, log: EventLog) -> bool:
    """Whether it is alive when the optimizer of its own step begins: a gradient, if nobody was
    asked (else gradients are labelled, and this is a buffer that is late to go).
    """
    if log.identified:
        return False
    for span in log.phases:
        if span.step == allocation.step and span.phase is Phase.OPTIMIZER:
            return allocation.alive_at(span.begin)
    return False


def is_head(module: str, log: EventLog) -> bool:
    """Whether ``module`` is the vocabulary projection: by what was seen, or by its name."""
    if log.head_module is not None:
        return module == log.head_module
    return module.rpartition(".")[2] in HEAD_NAMES


def _freed_in_scope(allocation: Allocation, log: EventLog) -> bool:
    """Whether it died before the module call ended that it was born in."""
    if allocation.scope is None or allocation.died is None:
        return False
    end = log.scopes[allocation.scope].end
    return end is not None and allocation.died < end
