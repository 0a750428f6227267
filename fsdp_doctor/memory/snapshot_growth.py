"""Memory that grows from step to step, and the code that holds on to it."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

import numpy as np

from fsdp_doctor.memory.snapshot_reader import Ints
from fsdp_doctor.memory.snapshot_view import View
from fsdp_doctor.model.snapshot import Growth, StepSummary

LEAST_STEPS = 4
FEW_STEPS = 3
FEW_SHARE = 0.1
"""With three steps the second must leave this share of the memory behind."""
LEAST_BYTES = 1 << 20
MAX_SUSPECTS = 10


def find_growth(view: View, steps: list[StepSummary]) -> Growth | None:
    """Return how much more stays from step to step; None where two steps are not seen.

    The first step is left out: it makes optimizer state, workspaces and caches. It is a leak where
    nearly every later step leaves more behind than the one before it; a large one, such as a kept
    graph, ends a job in its third step.
    """
    if len(steps) < 2:
        return None
    starts = [step.start_allocated_bytes for step in steps]
    later = starts[1:]
    growth = [b - a for a, b in pairwise(later)]
    typical = int(median(growth)) if growth else 0
    noise = max(LEAST_BYTES, max(starts) // 1000)
    rising = sum(delta > 0 for delta in growth)
    enough = len(steps) >= LEAST_STEPS or (
        len(steps) == FEW_STEPS and sum(growth) >= FEW_SHARE * max(starts)
    )
    leaking = enough and rising >= 0.8 * len(growth) and sum(growth) >= noise and typical > 0
    suspects = view.tops(_kept(view, steps), MAX_SUSPECTS) if leaking else ()
    return Growth(
        steps=tuple(step.step for step in steps),
        start_allocated_bytes=tuple(starts),
        per_step_bytes=typical,
        leaking=leaking,
        suspects=suspects,
    )


def _kept(view: View, steps: list[StepSummary]) -> Ints:
    """Blocks of the middle steps that are alive when the last step begins, where the same code
    leaves some behind in most steps (a cache is filled once).
    """
    blocks, last = view.replay.blocks, view.step_window(steps[-1].step)[0]
    middle = steps[1:-1]
    borders = np.array([view.step_window(step.step)[0] for step in middle] + [last])
    kept = np.flatnonzero(
        (blocks.born >= borders[0]) & (blocks.born < last) & (blocks.died >= last)
    )
    if not len(kept):
        return kept
    stack = blocks.stack[kept] + 1
    step = np.searchsorted(borders, blocks.born[kept], "right")
    pairs = np.unique(np.stack([stack, step]), axis=1)
    seen = np.bincount(pairs[0], minlength=int(stack.max()) + 1)
    return kept[seen[stack] >= max(2, 0.5 * len(middle))]
