"""Phases, steps and FSDP units of a snapshot, from its annotations and stacks.

``infer_marks`` knows the annotations of torch itself (2.5+). Here other names for the same moments
(profilers, trainers) and, where there are no annotations at all, what the stacks say, are put in
its terms; FSDP2's own annotations (``FSDP::pre_forward (blocks.3)``, torch 2.6 - 2.14,
``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``) become calls of modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fsdp_doctor.memory.cuda_phases import infer_marks
from fsdp_doctor.memory.cuda_trace import Backward, Begin, End, Enter, Leave, Mark, Note
from fsdp_doctor.memory.events import Allocation, EventLog
from fsdp_doctor.memory.snapshot_reader import Ints, Snapshot, Stack
from fsdp_doctor.memory.snapshot_replay import Replay
from fsdp_doctor.model.memory import Phase

_UNIT = re.compile(r"^FSDP::(\w+)(?: \((.+)\))?$")
_NATIVE = re.compile(
    r"^(DistributedDataParallel\.forward|FSDP::root_pre_forward|"
    r"FullyShardedDataParallel\.forward|Optimizer\.step#.*)$"
)
_FORWARD = re.compile(
    r"^(## ?forward ?##|forward|forward[-_]step|.*\.(training_step|forward_step))$", re.IGNORECASE
)
_BACKWARD = re.compile(
    r"^(## ?backward ?##|backward|backward[-_]step|.*\.(backward|backward_step)|"
    r"FSDP::pre_backward.*|FullyShardedDataParallel\._pre_backward_hook)$",
    re.IGNORECASE,
)
_OPTIMIZER = re.compile(r"^(## ?optimizer ?##|optimizer|optimizer[-_]step)$", re.IGNORECASE)
_RECOMPUTE = frozenset({"unpack_hook", "recompute_fn", "backward"})
ROOT = "(root)"
"""The FSDP unit that has no name."""

Moment = tuple[int, Phase | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where in the job every position lies."""

    log: EventLog
    """Phases and module calls; no allocations."""
    begins: Ints
    """Positions from which ``templates`` hold, ascending; the first is 0."""
    templates: tuple[Allocation, ...]
    """A block born there has this step, phase, region, module and scope."""
    unit_begins: Ints
    units: tuple[str | None, ...]
    """FSDP unit that an annotation names, from ``unit_begins`` on."""

    def at(self, position: int) -> Allocation:
        """The template of a position."""
        return self.templates[int(np.searchsorted(self.begins, position, "right")) - 1]

    def unit_at(self, position: int) -> str | None:
        """The FSDP unit whose hook runs, else the module that runs."""
        unit = self.units[int(np.searchsorted(self.unit_begins, position, "right")) - 1]
        return unit or self.at(position).module or None


def find_places(snapshot: Snapshot, replay: Replay) -> Places:
    """Phases, steps, module calls and FSDP units of one device."""
    notes = _annotations(snapshot, replay)
    placed: list[tuple[int, int, Note]] = [
        (mark.time_us, number, mark.note)
        for number, mark in enumerate(_phase_marks(snapshot, replay, notes))
    ]
    placed += [(position, 1 << 40, note) for position, note in _module_notes(notes)]
    placed.sort(key=lambda entry: entry[:2])
    begins, templates, log = _templates([(at, note) for at, _, note in placed], replay.end)
    unit_begins, units = _units(notes)
    return Places(
        log=log,
        begins=np.array(begins, dtype=np.int64),
        templates=tuple(templates),
        unit_begins=np.array(unit_begins, dtype=np.int64),
        units=tuple(units),
    )


def _annotations(snapshot: Snapshot, replay: Replay) -> list[tuple[int, bool, str]]:
    """(position, begins, name) of the device's annotations in order; none without a clock."""
    note = snapshot.notes
    if not snapshot.has_time or not len(replay.trace):
        return []
    chosen = np.flatnonzero(note["device"] == replay.device)
    clock = np.maximum.accumulate(replay.trace.time)
    at = np.searchsorted(clock, note["time_us"][chosen], "left")
    order = np.argsort(note["time_us"][chosen], kind="stable")
    names = snapshot.note_names
    return [
        (position, bool(start), names[name])
        for position, start, name in zip(
            at[order].tolist(),
            note["start"][chosen][order].tolist(),
            note["name"][chosen][order].tolist(),
            strict=True,
        )
    ]


def _phase_marks(
    snapshot: Snapshot, replay: Replay, notes: list[tuple[int, bool, str]]
) -> Iterator[Mark]:
    """Marks of ``infer_marks``, with positions for times."""
    moments = [moment for note in notes for moment in _moment(*note)]
    known = {phase for _, phase in moments}
    by_stack = _stack_moments(snapshot, replay)
    moments += [
        (at, phase)
        for at, phase in by_stack
        if phase is not None and (phase not in known or _starts_backward(snapshot, replay, at))
    ]
    moments.sort(key=lambda moment: moment[0])
    return iter(infer_marks(_in_torch_terms(_without_recompute(moments, by_stack)), 0))


def _moment(at: int, starts: bool, name: str) -> Iterable[Moment]:
    native = _NATIVE.match(name)
    if _OPTIMIZER.match(name) or (native and name.startswith("Optimizer")):
        yield at, Phase.OPTIMIZER if starts else None
    elif starts and (native or _FORWARD.match(name)):
        yield at, Phase.FORWARD
    elif starts and _BACKWARD.match(name):
        yield at, Phase.BACKWARD


def stack_phase(stack: Stack) -> Phase | None:
    """The phase in which such a stack is seen, or None: it could be any."""
    module_call = False
    for frame in stack.frames:
        place, _, function = frame.rpartition(" ")
        if function == "_make_grads" or "torch/autograd/__init__.py" in place:
            return Phase.BACKWARD
        if _repeats(place, function):
            return Phase.BACKWARD
        if function in _STEPS and ("torch/optim/" in place or "core/optimizer/" in place):
            return Phase.OPTIMIZER
        module_call = module_call or function == "_call_impl"
    return Phase.FORWARD if module_call else None


def _repeats(place: str, function: str) -> bool:
    """Whether a frame repeats a forward for activation checkpointing: torch's and Megatron's."""
    if "torch/utils/checkpoint.py" in place:
        return function in _RECOMPUTE
    return "core/tensor_parallel/random.py" in place and function == "backward"


def recomputes(frames: tuple[str, ...]) -> bool:
    """Whether a module that activation checkpointing runs again asked."""
    for number, frame in enumerate(frames):
        place, _, function = frame.rpartition(" ")
        if _repeats(place, function):
            return any(inner.endswith(" _call_impl") for inner in frames[:number])
    return False


_STEPS = frozenset({"step", "_use_grad", "profile_hook_step", "step_with_ready_grads", "wrapper"})


def _stack_moments(snapshot: Snapshot, replay: Replay) -> list[Moment]:
    """Where the stacks of allocations begin to speak of another phase."""
    codes = list(Phase)
    phases = [stack_phase(stack) for stack in snapshot.stacks]
    table = np.array([*(codes.index(p) if p else -1 for p in phases), -1])
    events = replay.trace.where("alloc")
    seen = table[replay.trace.stack[events]] if len(events) else events
    events, seen = events[seen >= 0], seen[seen >= 0]
    changed = np.flatnonzero(np.diff(seen, prepend=-1))
    return [(int(events[i]), codes[int(seen[i])]) for i in changed]


def _starts_backward(snapshot: Snapshot, replay: Replay, at: int) -> bool:
    """Whether ``torch.autograd`` makes its first gradient there: the surest sign of backward."""
    frames = snapshot.stacks[int(replay.trace.stack[at])].frames
    return bool(frames) and frames[0].endswith(" _make_grads")


def _without_recompute(moments: list[Moment], by_stack: list[Moment]) -> list[Moment]:
    """Drop forwards that run inside backward: activation checkpointing repeats them there."""
    positions = [at for at, _ in by_stack]
    kept: list[Moment] = []
    current: Phase | None = None
    for at, phase in moments:
        if phase is Phase.FORWARD and current is Phase.BACKWARD:
            index = int(np.searchsorted(positions, at, "right")) - 1
            if 0 <= index < len(by_stack) and by_stack[index][1] is Phase.BACKWARD:
                following = by_stack[index + 1 : index + 2]
                if not following or following[0][1] is not Phase.FORWARD:
                    continue
        current = phase
        kept.append((at, phase))
    return kept


def _in_torch_terms(moments: list[Moment]) -> dict[str, object]:
    """The moments as the annotations and stacks that ``infer_marks`` reads."""
    notes: list[dict[str, object]] = []
    trace: list[dict[str, object]] = [{"action": "snapshot", "time_us": 0}]
    for at, phase in moments:
        if phase is Phase.BACKWARD:
            frames = [{"name": "_make_grads"}]
            trace.append({"action": "alloc", "time_us": at, "frames": frames})
        else:
            forward = phase is Phase.FORWARD
            notes.append(
                {
                    "name": "DistributedDataParallel.forward" if forward else "Optimizer.step#",
                    "stage": "END" if phase is None else "START",
                    "time_us": at,
                }
            )
    return {"external_annotations": notes, "device_traces": [trace]}


def _module_notes(notes: list[tuple[int, bool, str]]) -> Iterator[tuple[int, Note]]:
    """FSDP2's hooks as calls of modules: between the two hooks of forward the module runs."""
    for at, starts, name in notes:
        match = _UNIT.match(name)
        if match is None:
            continue
        hook, module = match[1], match[2] or ""
        if hook == "pre_forward" and not starts:
            yield at, Enter(module)
        elif hook == "post_forward" and starts:
            yield at, Leave(module)
        elif hook == "pre_backward" and starts:
            yield at, Backward(module)


def _units(notes: list[tuple[int, bool, str]]) -> tuple[list[int], list[str | None]]:
    """The innermost FSDP unit that an open annotation names, from position to position."""
    begins: list[int] = [0]
    units: list[str | None] = [None]
    open_names: list[str] = []
    for at, starts, name in notes:
        match = _UNIT.match(name)
        if match is None or match[1] in ("cast_forward_inputs", "inputs_to_device"):
            continue
        unit = match[2] or ROOT
        if starts:
            open_names.append(unit)
        elif unit in open_names:
            del open_names[len(open_names) - 1 - open_names[::-1].index(unit)]
        now = open_names[-1] if open_names else None
        if now != units[-1]:
            begins.append(at)
            units.append(now)
    return begins, units


def _templates(
    placed: list[tuple[int, Note]], end: int
) -> tuple[list[int], list[Allocation], EventLog]:
    log = EventLog()
    begins, templates = [0], [_probe(log)]
    for at, note in placed:
        log.events.extend([0] * (at - log.position))
        _apply(log, note)
        if begins[-1] == at:
            templates[-1] = _probe(log)
        else:
            begins.append(at)
            templates.append(_probe(log))
    log.events.extend([0] * (end - log.position))
    return begins, templates, log


def _apply(log: EventLog, note: Note) -> None:
    if isinstance(note, Begin):
        log.begin_phase(note.step, note.phase, note.microbatch)
    elif isinstance(note, End):
        log.end_phase()
    elif isinstance(note, Enter):
        log.enter_module(note.module)
    elif isinstance(note, Leave):
        log.leave_module(note.module)
    elif isinstance(note, Backward):
        log.enter_backward(note.module)


def _probe(log: EventLog) -> Allocation:
    """What a block that is born now would be told about its place."""
    probe = log.allocate(0)
    log.allocations.pop()
    log.events.pop()
    return probe
