"""What one piece of code piles up: outputs of forwards that no backward follows, copies of state.

Both are told without the names of functions. Outputs: since the last backward or optimizer step the
model was called several times (the first allocation of a call comes again), and what those calls
left behind is of one piece of code. Copies: code that belongs to no phase of a step made blocks
whose sizes are those of parameters or optimizer state, or of shards of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fsdp_doctor.memory.mechanisms import builds_module, by_frames
from fsdp_doctor.memory.snapshot_logits import LEAST_BYTES
from fsdp_doctor.memory.snapshot_phases import stack_phase
from fsdp_doctor.memory.snapshot_reader import Ints
from fsdp_doctor.memory.snapshot_view import CATEGORY_NUMBER, View
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.model.snapshot import KeptOutputs, StateCopies

LEAST_PASSES = 3
ALONE = 0.7
"""Share of what the forwards left behind that one piece of code holds."""
MATCHING = 0.9
"""Share of the copied bytes whose sizes are those of state."""
LEAST_COPIES = 3
_ENDS = (Phase.BACKWARD, Phase.OPTIMIZER)
_STATE = (Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.GRADIENTS)


def find_kept_outputs(view: View, position: int) -> KeptOutputs | None:
    """Return what forwards without a backward left behind until ``position``; None: nothing."""
    blocks, stacks = view.replay.blocks, view.snapshot.stacks
    phases = [stack_phase(stack) for stack in stacks]
    ends = np.array([*(phase in _ENDS for phase in phases), False])
    calls = np.array(
        [
            *(
                phase is Phase.FORWARD and by_frames(stack.frames) is None
                for phase, stack in zip(phases, stacks, strict=True)
            ),
            False,
        ]
    )
    trace = view.replay.trace
    asked = trace.where("alloc")
    asked = asked[asked < position]
    last = asked[ends[trace.stack[asked]]]
    begins = [s.begin for s in view.places.log.phases if s.phase in _ENDS and s.begin < position]
    begin = max([int(last[-1]) if len(last) else 0, *begins])
    window = np.flatnonzero((blocks.born > begin) & (blocks.born < position) & calls[blocks.stack])
    if not len(window):
        return None
    window = window[np.argsort(blocks.born[window], kind="stable")]
    passes = int((blocks.stack[window] == blocks.stack[window[0]]).sum())
    alive = window[blocks.died[window] >= position]
    if passes < LEAST_PASSES or not len(alive):
        return None
    held = np.bincount(blocks.stack[alive], blocks.size[alive])
    most = int(held.argmax())
    own = alive[blocks.stack[alive] == most]
    whole = blocks.size[alive][blocks.born[alive] <= blocks.born[own[-1]]].sum()
    if not LEAST_PASSES <= len(own) <= 2 * passes or held[most] < ALONE * whole:
        return None
    if most == int(blocks.stack[window[0]]):
        return None  # nothing but these blocks is seen: they may as well be a layer's
    return KeptOutputs(
        passes=passes,
        blocks=len(own),
        bytes=int(blocks.size[own].sum()),
        made_by=view.tops(own, 1)[0],
    )


def find_state_copies(view: View, position: int) -> StateCopies | None:
    """Return copies of the state that are alive at ``position``; None: there are none."""
    blocks, stacks = view.replay.blocks, view.snapshot.stacks
    spans = [s.begin for s in view.places.log.phases if s.phase is Phase.FORWARD]
    if not spans:
        return None
    alive = view.replay.blocks.alive_at(position)
    category = view.verdicts.category[alive]
    state = np.isin(category, [CATEGORY_NUMBER[c] for c in _STATE])
    sizes = np.unique(blocks.requested[alive[state]])
    outside = np.array([*(_outside(stack.frames, stack_phase(stack)) for stack in stacks), False])
    copies = alive[(blocks.born[alive] > spans[0]) & outside[blocks.stack[alive]] & ~state]
    if not len(copies) or not len(sizes):
        return None
    held = np.bincount(blocks.stack[copies], blocks.size[copies])
    for stack in np.argsort(-held)[:4].tolist():
        own = copies[blocks.stack[copies] == stack]
        if len(own) >= LEAST_COPIES and _of_state(blocks.requested[own], sizes):
            refused = view.replay.trace.where("oom")
            asked = view.replay.trace.stack[refused[refused >= position][:1]]
            made = copies[_same_code(view, stack)[blocks.stack[copies]]]
            return StateCopies(
                blocks=len(made),
                bytes=int(blocks.size[made].sum()),
                refused=bool(len(asked) and _same_code(view, stack)[asked[0]]),
                made_by=view.tops(own, 1)[0],
            )
    return None


def _outside(frames: tuple[str, ...], phase: Phase | None) -> bool:
    """Whether code that belongs to no phase of a step asked."""
    return (
        bool(frames) and phase is None and by_frames(frames) is None and not builds_module(frames)
    )


def _same_code(view: View, stack: int) -> npt.NDArray[np.bool_]:
    """Stacks with the same innermost frame: a helper that copies one tensor after the other."""
    stacks = view.snapshot.stacks
    first = stacks[stack].frames[0]
    return np.array([*(s.frames[:1] == (first,) for s in stacks), False])


def _of_state(requested: Ints, state: Ints) -> bool:
    """Whether blocks are as large as blocks of the state, or all the same number of times that."""
    large = requested[requested >= LEAST_BYTES // 16]
    if len(large) < LEAST_COPIES or len(np.unique(large)) < 2:
        return False
    ratios = {1.0, 0.5, 2.0, *(float(large.max() / size) for size in np.unique(state)[-4:])}
    return any(
        ratio >= 0.5
        and (2 * ratio).is_integer()
        and large[np.isin(large, (state * ratio).astype(np.int64))].sum() >= MATCHING * large.sum()
        for ratio in ratios
    )
