"""The changes that ``fit`` may propose, as data.

A move sets fields of a spec where its conditions hold. It never changes what is trained: model,
data, global batch, optimizer and schedule stay. Moves of one family exclude each other; of these
the stronger saves more and costs more.
"""

from __future__ import annotations

from fsdp_doctor.fit import megatron_moves, torch_moves
from fsdp_doctor.fit.move import (
    ACCUMULATION,
    ALLOC_CONF,
    MICRO,
    SIMULATED,
    STRATEGY,
    Move,
    divisible,
    of,
)


def _smaller_batch(divisor: int) -> Move:
    return Move(
        name=f"micro-batch-{divisor}",
        title=f"micro batch divided by {divisor}, {divisor} x the accumulation steps",
        family="micro-batch",
        strength=divisor,
        when={STRATEGY: SIMULATED, MICRO: divisible(divisor)},
        sets={
            MICRO: of(MICRO, lambda n: n // divisor),
            ACCUMULATION: of(ACCUMULATION, lambda n: n * divisor),
        },
        saves="activations, logits",
        costs="smaller kernels; collectives of every micro step (the global batch stays)",
    )


MOVES: tuple[Move, ...] = (
    Move(
        name="expandable-segments",
        title="expandable segments in the allocator",
        family="allocator",
        when={STRATEGY: SIMULATED},
        environment={ALLOC_CONF: "expandable_segments:True"},
        saves="what fragmentation keeps reserved",
        costs="nothing per step once segments are mapped",
    ),
    Move(
        name="max-split-size",
        title="blocks over 256 MiB are not split",
        family="allocator",
        when={STRATEGY: SIMULATED},
        environment={ALLOC_CONF: "max_split_size_mb:256"},
        saves="large cached blocks that a small request would break up",
        costs="large requests may have to allocate anew",
    ),
    *torch_moves.MOVES,
    *megatron_moves.MOVES,
    _smaller_batch(2),
    _smaller_batch(4),
    _smaller_batch(8),
)
"""In the order in which they are applied: an engine first, what acts under it after."""
