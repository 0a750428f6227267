"""Which blocks of a snapshot are logits: by the code of the loss, and by the sizes it works on.

A snapshot has no shapes and seldom module names. But what a loss makes of logits is as large as
they are in float32: a block of that size, or of half of it, that some code asks for once in a
forward (a layer asks as often as there are layers) is the projection's output or a copy of it. The
line of the model that was found so tells the same of evaluations, which have no loss.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from fsdp_doctor.memory.mechanisms import by_frames
from fsdp_doctor.memory.snapshot_phases import Places, stack_phase
from fsdp_doctor.memory.snapshot_reader import Ints, Snapshot, Stack
from fsdp_doctor.memory.snapshot_replay import Replay, rounded
from fsdp_doctor.model.memory import Category, Phase

LEAST_BYTES = 1 << 20
ONCE = 1.5
"""A place asks so often in a forward at most; a layer's ask once per layer."""
_LOSS = re.compile(
    r"cross_entropy|nll_loss|log_?softmax|logits|log_?probs?\b|(?:^|_)loss(?:_fn|_func)?$", re.I
)
_NO_LOSS = re.compile(r"aux|balanc|router|z_loss", re.I)
"""Losses of a mixture of experts, which are not over the vocabulary."""
_CALL = " _call_impl"


def names_loss(frames: tuple[str, ...]) -> bool:
    """Whether the loss asked, by the names of functions and files up to the next module call."""
    for frame in frames:
        place, _, function = frame.rpartition(" ")
        if frame.endswith(_CALL):
            return False
        file = place.rpartition(":")[0].rpartition("/")[2]
        told = _LOSS.search(function) is not None or "cross_entropy" in file
        if told and _NO_LOSS.search(function) is None:
            return True
    return False


def is_loss(stack: Stack) -> bool:
    """Whether the code of a loss asked for a block."""
    known = by_frames(stack.frames)
    return known.category is Category.LOGITS if known is not None else names_loss(stack.frames)


def place_of_use(stack: Stack) -> tuple[str, ...]:
    """The frames up to the first that is not torch's own: which line of a model asked."""
    for number, frame in enumerate(stack.frames):
        if not frame.startswith("torch/"):
            return stack.frames[: number + 1]
    return stack.frames


def find_logits(
    snapshot: Snapshot, replay: Replay, places: Places, open_blocks: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Which of ``open_blocks``, of which nothing better is known, are logits or made of them.

    ``open_blocks`` is a mask over the blocks of ``replay``, and so is the answer.
    """
    blocks, stacks = replay.blocks, snapshot.stacks
    found = np.zeros(len(blocks), dtype=np.bool_)
    loss = np.array([*map(is_loss, stacks), False])
    if not loss.any():
        return found
    named = loss[blocks.stack]
    sizes, passes = _sizes(replay, blocks.stack, named, loss)
    if len(sizes):
        computes = np.array(
            [*(stack_phase(stack) in (Phase.FORWARD, None) for stack in stacks), False]
        )
        fitting = open_blocks & np.isin(blocks.size, sizes) & computes[blocks.stack]
        born = np.bincount(blocks.stack[fitting] + 1, minlength=len(stacks) + 1)[1:]
        forwards = sum(span.phase is Phase.FORWARD for span in places.log.phases)
        once = np.append(born <= ONCE * max(passes or forwards, 1), False)
        found = fitting & once[blocks.stack]
        found |= open_blocks & _same_use(stacks, blocks.stack, blocks.size, found, fitting)
    return np.asarray(found | (named & open_blocks), dtype=np.bool_)


def _same_use(
    stacks: tuple[Stack, ...],
    stack: Ints,
    size: Ints,
    found: npt.NDArray[np.bool_],
    fitting: npt.NDArray[np.bool_],
) -> npt.NDArray[np.bool_]:
    """Blocks that the same lines of the model ask for, where those ask mostly for logits: a line of
    a library asks for everybody.
    """
    known: dict[tuple[str, ...], int] = {}
    use = np.array([*(known.setdefault(place_of_use(s), len(known)) for s in stacks), -1])[stack]
    asked = np.bincount(use + 1, size, len(known) + 1)
    fits = np.bincount(use[fitting] + 1, size[fitting], len(known) + 1)
    mostly = fits >= 0.5 * np.maximum(asked, 1)
    mostly[0] = False
    mine = np.zeros(len(known) + 1, dtype=np.bool_)
    mine[use[found] + 1] = True
    return np.asarray((mine & mostly)[use + 1], dtype=np.bool_)


def _sizes(
    replay: Replay, stack: Ints, named: npt.NDArray[np.bool_], loss: npt.NDArray[np.bool_]
) -> tuple[Ints, int]:
    """Sizes of logits in float32 and in half of it, and how often the loss ran."""
    blocks, trace = replay.blocks, replay.trace
    large = named & (blocks.requested >= LEAST_BYTES)
    refused = trace.where("oom")
    refused = refused[loss[trace.stack[refused]]]
    asked = trace.size[refused]
    whole = np.unique(np.concatenate([blocks.requested[large], asked[asked >= LEAST_BYTES]]))
    often = int(np.bincount(stack[large]).max()) if large.any() else 0
    return np.unique(rounded(np.concatenate([whole, whole // 2]))), often
