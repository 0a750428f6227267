"""Extending a few layers to many: on logs made by hand, whose long form is known."""

from __future__ import annotations

import pytest

from fsdp_doctor.memory.events import EventLog, Label
from fsdp_doctor.memory.replay import StreamNotes
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.model.spec import (
    ActivationCheckpointing,
    ModelSpec,
    ProfileSpec,
    TrainingConfig,
    Workload,
)
from fsdp_doctor.model.work import Copies, Kernel, StepWork
from fsdp_doctor.simulator.extend import NotPeriodicError, extend
from fsdp_doctor.simulator.tape import read_tape, write_tape

MIB = 1 << 20


def log_of(layers: int, *, bucket: int = 0, odd: int | None = None) -> tuple[EventLog, StreamNotes]:
    """Two steps: parameters, activations freed in reverse, scratch of layer i freed in layer i + 1
    and used by a second stream, and one small block that grows with the layers.

    ``bucket``: bytes of each layer in a block that all share. ``odd``: a layer of another size.
    """
    log, streams = EventLog(identified=True), StreamNotes()
    log.begin_phase(-1, Phase.WRAP)
    log.allocate(5 * MIB).label = Label(Category.PARAMETERS, module="embedding")
    for layer in range(layers):
        size = 3 * MIB if layer == odd else 2 * MIB
        log.allocate(size).label = Label(Category.PARAMETERS, module=f"blocks.{layer}.ffn")
    for step in range(2):
        log.begin_phase(step, Phase.FORWARD)
        log.enter_module("")
        activations, scratch = [], None
        for layer in range(layers):
            log.enter_module(f"blocks.{layer}")
            activations.append(log.allocate(MIB))
            fresh = log.allocate(4 * MIB, operator="gather")
            streams.uses[fresh.id] = {1}
            if scratch is not None:
                log.free(scratch)
                streams.waits.append((log.position, log.position - 2))
            scratch = fresh
            log.leave_module(f"blocks.{layer}")
        log.leave_module("")
        log.begin_phase(step, Phase.BACKWARD)
        if scratch is not None:
            log.free(scratch)
        for layer in reversed(range(layers)):
            log.enter_backward(f"blocks.{layer}")
            log.free(activations[layer])
        log.begin_phase(step, Phase.OPTIMIZER)
        norms = [log.allocate(4 * layers)]
        if bucket:
            norms.append(log.allocate(bucket * layers))
        lists = [log.allocate(2 * MIB) for _ in range(layers)]
        for block in (*norms, *lists):
            log.free(block)
    log.end_phase()
    return log, streams


def extended(layers: int, **kwargs: int) -> tuple[EventLog, StreamNotes]:
    """The log of ``layers`` layers, from those of 4, 5 and 6."""
    tapes = [write_tape(*log_of(count, **kwargs), "blocks") for count in (4, 5, 6)]
    return read_tape(extend(tapes, (4, 5, 6), layers))


@pytest.mark.parametrize("layers", [6, 7, 40])
def test_the_long_log_is_that_of_all_layers(layers: int) -> None:
    """Every block with its size, place, module and life, every phase, call, stream and wait."""
    found, streams = extended(layers)
    log, expected = log_of(layers)
    assert found.events == log.events
    assert found.allocations == log.allocations
    assert found.phases == log.phases
    assert found.scopes == log.scopes
    assert streams == expected


def test_a_tape_reads_back_to_its_log() -> None:
    """Nothing is lost in writing."""
    log, streams = log_of(3)
    found, notes = read_tape(write_tape(log, streams, "blocks"))
    assert (found.events, found.allocations) == (log.events, log.allocations)
    assert (found.phases, found.scopes, notes) == (log.phases, log.scopes, streams)


@pytest.mark.parametrize(("bucket", "message"), [(10_000, "size"), (100_000, "is new")])
def test_a_block_that_all_layers_fill_is_refused(bucket: int, message: str) -> None:
    """A bucket that grows with each layer would be full one day."""
    with pytest.raises(NotPeriodicError, match=message):
        extended(40, bucket=bucket)


def test_a_layer_unlike_the_others_is_noticed() -> None:
    """The sixth layer is larger: two short runs do not show it, the third does."""
    with pytest.raises(NotPeriodicError):
        extended(40, odd=5)


def spec(layers: int, strategy: str, **others: object) -> ProfileSpec:
    """A spec with so many layers."""
    return ProfileSpec(
        name="job",
        world_size=8,
        workload=Workload(model=ModelSpec(layers=layers)),
        config=TrainingConfig(strategy=strategy, **others),  # type: ignore[arg-type]
    )


def test_which_layers_stand_for_all() -> None:
    """Three numbers with the remainder of the period; none where it would not pay."""
    pytest.importorskip("torch")
    from fsdp_doctor.simulator.short_cut import layer_counts

    every = ActivationCheckpointing(mode="every_n", every_n=3)
    assert layer_counts(spec(32, "fsdp2")) == (3, 4, 5)
    assert layer_counts(spec(80, "fsdp1", activation_checkpointing=every)) == (8, 11, 14)
    assert layer_counts(spec(12, "fsdp2")) == ()
    with pytest.raises(NotPeriodicError, match="buckets"):
        layer_counts(spec(32, "ddp"))


def kernel(operator: str, written: int, count: int, launches: int = 1) -> Kernel:
    """A kernel of the memory kind."""
    return Kernel(
        phase="forward",
        operator=operator,
        kind="memory",
        dtype="float32",
        flops=0,
        read_bytes=written,
        written_bytes=written,
        launches=launches,
        count=count,
    )


def work_of(layers: int) -> StepWork:
    """Work of which counts grow, and of which one kernel's size does."""
    elements = 30_000_000 * layers
    launches = -(-elements // (320 * 65536))
    return StepWork(
        kernels=(
            kernel("mul", 1024, 3 * layers + 1),
            kernel("_foreach_mul_", 4 * elements, 2, launches),
        ),
        copies=(Copies(phase="forward", place="host", total_bytes=10 * layers, count=layers),),
    )


def test_work_grows_with_the_layers() -> None:
    """Counts and sizes go on; launches follow from sizes; what does not go on is refused."""
    pytest.importorskip("torch")
    from fsdp_doctor.simulator.extend_work import extend_work

    works = [work_of(count) for count in (4, 5, 6)]
    assert extend_work(works, (4, 5, 6), 80) == work_of(80)
    with pytest.raises(NotPeriodicError):
        extend_work([*works[:2], work_of(7)], (4, 5, 6), 80)
