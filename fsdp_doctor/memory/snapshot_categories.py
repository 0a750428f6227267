"""The category of every block of a snapshot.

``categories.classify`` decides. It is asked once per group of blocks that it cannot tell apart
(same stack, phase, region, module and the same fate), so a million blocks cost a few thousand
questions. What a snapshot alone leaves open (nobody labelled the tensors) is settled afterwards, in
``_settle``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fsdp_doctor.memory.categories import CUBLAS_WORKSPACES, classify
from fsdp_doctor.memory.events import Allocation, EventLog
from fsdp_doctor.memory.mechanisms import builds_module
from fsdp_doctor.memory.snapshot_logits import find_logits
from fsdp_doctor.memory.snapshot_phases import Places, recomputes, stack_phase
from fsdp_doctor.memory.snapshot_reader import Ints, Snapshot
from fsdp_doctor.memory.snapshot_replay import BEFORE, NEVER, Replay
from fsdp_doctor.model.memory import Category, Phase

CATEGORIES = tuple(Category)
_OPEN = (Category.ACTIVATIONS, Category.TEMPORARIES, Category.UNKNOWN)
"""What later evidence may still change."""
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What every block holds."""

    category: Ints
    """Index in ``CATEGORIES``, per block."""
    group: Ints
    """Index in ``groups``, per block."""
    groups: tuple[Allocation, ...]
    """One classified block of each group."""
    template: Ints
    """Index in ``Places.templates``, per block."""


def categorise(snapshot: Snapshot, replay: Replay, places: Places) -> Verdicts:
    """Classify all blocks of a replay."""
    blocks = replay.blocks
    template = np.searchsorted(places.begins, blocks.born, "right") - 1
    fate = _fates(replay, places, template)
    key = _template_classes(places)[template]
    key = (key * (len(snapshot.stacks) + 1) + blocks.stack + 1) * (1 << len(fate))
    for bit, facts in enumerate(fate):
        key = key + (facts.astype(np.int64) << bit)
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    groups = []
    for index in first.tolist():
        allocation = _allocation(snapshot, replay, places, index, int(template[index]))
        allocation.category, allocation.subcategory = classify(allocation, places.log)
        groups.append(allocation)
    _settle(groups, fate, first)
    codes = {category: number for number, category in enumerate(CATEGORIES)}
    table = np.array([codes[g.category or Category.UNKNOWN] for g in groups], dtype=np.int64)
    category = table[group] if groups else np.zeros(0, dtype=np.int64)
    _late_gradients(category, replay, places, template)
    open_blocks = np.isin(category, [codes[c] for c in _OPEN])
    category[find_logits(snapshot, replay, places, open_blocks)] = codes[Category.LOGITS]
    return Verdicts(
        category=category, group=group.reshape(-1), groups=tuple(groups), template=template
    )


def block_at(
    snapshot: Snapshot, replay: Replay, places: Places, verdicts: Verdicts, index: int
) -> Allocation:
    """One block as a classified allocation, its module the FSDP unit where that is known."""
    example = verdicts.groups[int(verdicts.group[index])]
    allocation = _allocation(snapshot, replay, places, index, int(verdicts.template[index]))
    allocation.category = CATEGORIES[int(verdicts.category[index])]
    if allocation.category is example.category:
        allocation.subcategory = example.subcategory
        allocation.module = example.module
    if allocation.born != BEFORE:
        unit = places.units[int(np.searchsorted(places.unit_begins, allocation.born, "right")) - 1]
        allocation.module = unit or allocation.module
    return allocation


def _allocation(
    snapshot: Snapshot, replay: Replay, places: Places, index: int, template: int
) -> Allocation:
    blocks = replay.blocks
    stack, died, born = int(blocks.stack[index]), int(blocks.died[index]), int(blocks.born[index])
    known = snapshot.stacks[stack] if stack >= 0 else None
    older = born == BEFORE
    base = Allocation(id=0, size_bytes=0, requested_bytes=0)
    found = replace(
        base if older else places.templates[template],
        id=index,
        size_bytes=int(blocks.size[index]),
        requested_bytes=int(blocks.requested[index]),
        stream=int(blocks.stream[index]),
        born=born,
        died=None if died == NEVER else died,
        frames=known.frames if known else (),
        operator=known.operator if known else None,
    )
    before_steps = older or (not places.log.phases and found.phase is Phase.UNKNOWN)
    if before_steps and found.died is None and builds_module(found.frames):
        found.phase = Phase.WRAP  # made by set-up code, before the trace or before any step
    elif found.phase is Phase.UNKNOWN and known and not older and places.log.phases:
        # between the marked phases (an evaluation, or a trainer without marks) stacks tell
        found.phase = stack_phase(known) or Phase.UNKNOWN
    return found


def _template_classes(places: Places) -> Ints:
    """A number per template, equal where ``classify`` sees no difference; one for 'before'."""
    seen: dict[tuple[object, ...], int] = {}
    numbers = [
        seen.setdefault((t.phase, t.region, t.module, t.step < 0), len(seen) + 1)
        for t in places.templates
    ]
    return np.array([*numbers, 0], dtype=np.int64)  # blocks older than the trace have index -1


def _fates(replay: Replay, places: Places, template: Ints) -> list[Bools]:
    """What ``classify`` asks about a block's life: one bit each."""
    blocks, log = replay.blocks, places.log
    steps = [*(t.step for t in places.templates), -1]
    scopes = [*(t.scope for t in places.templates), None]
    ends = [NEVER if scope.end is None else scope.end for scope in log.scopes]
    scope_end = np.array([-1 if scope is None else ends[scope] for scope in scopes])
    forward = dict(_first_spans(log, Phase.FORWARD))
    optimizer = dict(_first_spans(log, Phase.OPTIMIZER))
    next_forward = _after(forward, steps)
    next_optimizer = np.array([optimizer.get(step, -1) for step in steps])
    return [
        blocks.died == NEVER,
        blocks.died < _setup_ends(places, replay)[template],
        _alive_at(replay, next_forward[template]),
        _alive_at(replay, next_optimizer[template]),
        blocks.died < scope_end[template],
        np.isin(blocks.requested, list(CUBLAS_WORKSPACES)),
        blocks.born == BEFORE,
    ]


def _first_spans(log: EventLog, phase: Phase) -> list[tuple[int, int]]:
    """(step, position of its first span of the phase), the last step first."""
    return [(span.step, span.begin) for span in reversed(log.phases) if span.phase is phase]


def _after(positions: dict[int, int], steps: list[int]) -> Ints:
    """Where, after each of ``steps``, the first position of a later one is; -1: there is none."""
    known = np.array(sorted(positions), dtype=np.int64)
    at = np.array([positions[step] for step in known.tolist()], dtype=np.int64)
    earliest = np.append(np.minimum.accumulate(at[::-1])[::-1], -1)
    return np.asarray(earliest[np.searchsorted(known, np.array(steps), "right")])


def _alive_at(replay: Replay, positions: Ints) -> Bools:
    blocks = replay.blocks
    return (positions >= 0) & (blocks.born < positions) & (blocks.died >= positions)


def _setup_ends(places: Places, replay: Replay) -> Ints:
    """Per template: where its set-up phase ends for the last time."""
    ends: dict[Phase, int] = {}
    for span in places.log.phases:
        end = replay.end if span.end is None else span.end
        ends[span.phase] = max(ends.get(span.phase, 0), end)
    return np.array([*(ends.get(t.phase, 0) for t in places.templates), 0], dtype=np.int64)


def _settle(groups: list[Allocation], fate: list[Bools], first: Ints) -> None:
    """What classify leaves open because nobody labelled the tensors.

    A block of backward that the optimizer meets is a gradient, also where ``zero_grad`` comes only
    after the next forward began. What modules ask for while activation checkpointing repeats their
    forward is kept for their backward.
    """
    for allocation, index in zip(groups, first.tolist(), strict=True):
        persistent = allocation.subcategory == "persistent"
        if persistent and allocation.phase is Phase.BACKWARD and fate[3][index]:
            allocation.category, allocation.subcategory = Category.GRADIENTS, None
        elif allocation.category is Category.TEMPORARIES and recomputes(allocation.frames):
            allocation.category, allocation.subcategory = Category.ACTIVATIONS, "recomputed"


def _late_gradients(category: Ints, replay: Replay, places: Places, template: Ints) -> None:
    """Gradients of a backward after which no optimizer ran: the trace ends before.

    They are alive at the end and as large as a parameter.
    """
    blocks = replay.blocks
    last = max((s.step for s in places.log.phases), default=-1)
    if any(s.step == last and s.phase is Phase.OPTIMIZER for s in places.log.phases):
        return
    here = np.array(
        [*(t.step == last and t.phase is Phase.BACKWARD for t in places.templates), False]
    )
    parameters = blocks.requested[category == CATEGORIES.index(Category.PARAMETERS)]
    open_now = np.isin(
        category,
        [CATEGORIES.index(Category.TEMPORARIES), CATEGORIES.index(Category.UNKNOWN)],
    )
    found = here[template] & (blocks.died == NEVER) & open_now
    found &= np.isin(blocks.requested, parameters)
    category[found] = CATEGORIES.index(Category.GRADIENTS)
