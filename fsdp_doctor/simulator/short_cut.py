"""Simulate a few layers instead of all of them, where layers repeat.

Three short runs in a forked process, one after the other, so that what torch learns and keeps in
the first (how operators are sharded, what shapes they return) serves the others; ``extend`` makes
the long one of two of them and proves itself on the third. Where layers turn out not to repeat
exactly, all of them are simulated.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from fsdp_doctor.config.megatron_check import STRATEGIES as MEGATRON
from fsdp_doctor.errors import InputError
from fsdp_doctor.memory.events import EventLog
from fsdp_doctor.memory.replay import StreamNotes
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.model.work import StepWork
from fsdp_doctor.profiler.ranks import die_with_parent
from fsdp_doctor.simulator.extend import NotPeriodicError, extend
from fsdp_doctor.simulator.extend_work import extend_work
from fsdp_doctor.simulator.tape import Tape, read_tape, write_tape

BLOCKS = "blocks"
"""The built-in model's list of layers."""
STRATEGIES = ("ddp", "fsdp1", "fsdp2")
"""Whose layers were looked at; Megatron lays all gradients into buffers of its own."""
_LEAST = {"ddp": 4, "fsdp1": 4, "fsdp2": 3}
"""Layers of the shortest run: the first, the last and one between; FSDP1's host waits for the
all-gather before the last one. Each time it is proven that they repeat."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulated rank did."""

    log: EventLog
    streams: StreamNotes
    work: StepWork
    """Of the last step."""
    layers: str | None = None
    """How its layers were come by, in words; None: nothing to say."""


Simulate = Callable[[ProfileSpec], Simulated]
Answer = tuple[Tape, StepWork]


def simulate_layers(spec: ProfileSpec, simulate: Simulate, *, every_layer: bool) -> Simulated:
    """Run ``simulate`` on shorter models and extend, or on all layers where that cannot be.

    ``simulate`` is called in this process only when all layers are run.
    """
    layers = spec.workload.model.layers
    try:
        counts = () if every_layer else layer_counts(spec)
        if not counts:
            return simulate(spec)
        found = _run_apart([with_layers(spec, count) for count in counts], simulate)
        log, streams = read_tape(extend([tape for tape, _ in found], counts, layers))
        work = extend_work([work for _, work in found], counts, layers)
    except (NotPeriodicError, ValueError) as error:
        note = f"all {layers} layers were simulated, for they do not repeat: {error}"
        return replace(simulate(spec), layers=note)
    first, second, third = counts
    note = f"{layers} layers extended from runs of {first} and {second}, and tried on {third}"
    return Simulated(log, streams, work, note)


def layer_counts(spec: ProfileSpec) -> tuple[int, ...]:
    """Return three numbers of layers that stand for all; empty: it would not pay.

    They keep the remainder by the period, which is that of checkpointed blocks and of blocks that
    share a unit. A user's own model cannot be built with fewer layers. Raises NotPeriodicError
    where layers are known not to repeat.
    """
    model, config = spec.workload.model, spec.config
    if model.factory is not None or config.compile or config.strategy in MEGATRON:
        return ()  # Megatron's buckets and units in flight are cut by elements
    checkpointing = config.activation_checkpointing
    period = checkpointing.every_n if checkpointing.mode == "every_n" else 1
    if config.strategy == "fsdp2" and config.fsdp2.wrap == "block":
        period = math.lcm(period, config.fsdp2.blocks_per_unit)
    least = _LEAST[config.strategy] if period == 1 else 2 * period + 2
    first = least + (model.layers - least) % period
    counts = (first, first + period, first + 2 * period)
    if sum(counts) >= model.layers:
        return ()
    if config.strategy == "ddp":
        raise NotPeriodicError("DDP cuts its buckets by bytes")
    return counts


def with_layers(spec: ProfileSpec, layers: int) -> ProfileSpec:
    """Return the spec of a model with another number of layers."""
    model = replace(spec.workload.model, layers=layers)
    return replace(spec, workload=replace(spec.workload, model=model))


def _run_apart(specs: Sequence[ProfileSpec], simulate: Simulate) -> list[Answer]:
    """Simulate the specs in a process forked from this one, which stays as it is.

    Raises NotPeriodicError when one fails: the run of all layers shows why.
    """
    context = multiprocessing.get_context("fork")
    answers, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, specs, simulate))
    process.start()
    sender.close()
    found: list[Answer] = []
    try:
        for spec in specs:
            answer = _receive(answers)
            if answer is None:
                raise NotPeriodicError(f"a run of {spec.workload.model.layers} layers failed")
            found.append(answer)
    finally:
        answers.close()
        process.join()
    return found


def _child(sender: Connection, specs: Sequence[ProfileSpec], simulate: Simulate) -> None:
    die_with_parent()
    gc.freeze()  # collections look at the runs' own objects only
    for spec in specs:
        gc.collect()  # what is left of the run before
        try:
            run = simulate(spec)
        except InputError:
            return  # told by the run of all layers
        sender.send((write_tape(run.log, run.streams, BLOCKS), run.work))


def _receive(answers: Connection) -> Answer | None:
    try:
        answer: Answer = answers.recv()
    except EOFError:
        return None
    return answer
