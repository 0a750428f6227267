"""Runs that exercise every part of a report."""

from __future__ import annotations

from dataclasses import replace

from builders import (
    GIB,
    MIB,
    make_rank,
    make_run,
    make_value,
)

from fsdp_doctor.model.memory import Category, MemoryCounters, Phase, TopAllocation
from fsdp_doctor.model.run import (
    CheckpointRecord,
    Failure,
    ModelSizes,
    PhaseRecord,
    RankSeries,
    Run,
    RunManifest,
    StepRecord,
    TimeBreakdown,
)

HOSTILE = "</script><img src=x onerror=alert(1)>[bold]$x^2$|`a`\x1b[31m"
"""A name that tries HTML, rich markup, math, Markdown and terminal escapes."""
PEAKS_A = {
    "forward": {"parameters": 1 * GIB, "unsharded_parameters": 512 * MIB, "activations": 3 * GIB},
    "backward": {
        "parameters": 1 * GIB,
        "unsharded_parameters": 768 * MIB,
        "activations": 3 * GIB,
        "gradients": 1 * GIB,
        "communication": 256 * MIB,
        "temporaries": 100 * MIB,
        "rounding": 4096,
    },
    "optimizer": {"parameters": 1 * GIB, "gradients": 1 * GIB, "optimizer_state": 2 * GIB},
}
PEAKS_B = {
    "forward": {"parameters": 1 * GIB, "unsharded_parameters": 4 * GIB, "activations": 3 * GIB},
    "backward": {
        "parameters": 1 * GIB,
        "unsharded_parameters": 4 * GIB,
        "activations": 3 * GIB,
        "gradients": 1 * GIB,
        "unsharded_gradients": 512 * MIB,
        "communication": 256 * MIB,
        "temporaries": 100 * MIB,
    },
    "optimizer": {"parameters": 1 * GIB, "gradients": 1 * GIB, "optimizer_state": 2 * GIB},
}
RESIDENT = {"parameters": 1 * GIB, "optimizer_state": 2 * GIB}
TOP = (
    TopAllocation(
        bytes=3 * GIB,
        count=96,
        category=Category.ACTIVATIONS,
        subcategory="attention",
        phase=Phase.FORWARD,
        step=1,
        module="blocks.11.attention.output_projection",
        operator="aten.mm.default",
        frames=(
            "/home/user/project/training/models/transformer.py:214 forward",
            "train.py:31 step",
        ),
    ),
    TopAllocation(
        bytes=768 * MIB, count=1, category=Category.UNSHARDED_PARAMETERS, phase=Phase.BACKWARD
    ),
)
BREAKDOWN = (
    TimeBreakdown(
        phase=Phase.FORWARD,
        wall_s=0.040,
        kernel_s=0.030,
        exposed_communication_s=0.006,
        communication_s=0.012,
        copy_s=0.001,
        idle_s=0.003,
    ),
    TimeBreakdown(
        phase=Phase.BACKWARD,
        wall_s=0.080,
        kernel_s=0.062,
        exposed_communication_s=0.010,
        communication_s=0.030,
        copy_s=0.002,
        idle_s=0.006,
    ),
)
TIMES = (0.1502, 0.1498, 0.1511, 0.1495, 0.1507)


def complete_run(name: str = "gpt-fsdp2", *, regressed: bool = False) -> Run:
    """Return a run of two GPUs with everything a run can record."""
    peaks = PEAKS_B if regressed else PEAKS_A
    factor = 1.06 if regressed else 1.0
    ranks = []
    for rank in (0, 1):
        times = [t * factor * (1 + 0.004 * rank * (i % 3 - 1)) for i, t in enumerate(TIMES)]
        series = make_rank(
            rank,
            peaks=peaks,
            times=times,
            resident=RESIDENT,
            reserved=(11 if regressed else 7) * GIB + rank * 64 * MIB,
            device_used=(12 if regressed else 8) * GIB + 300 * MIB,
            retries=(0, 0, 0, 1, 1) if rank else (),
            phase_times={p: [t * f for t in times] for p, f in _PHASE_SHARES.items()},
            breakdown=BREAKDOWN if rank == 0 else (),
        )
        assert series.anatomy is not None
        anatomy = replace(
            series.anatomy,
            top_allocations=TOP,
            expected_bytes={"parameters": 1 * GIB},
            incomplete="the history ring overflowed" if rank == 0 else None,
        )
        ranks.append(replace(series, anatomy=anatomy, setup=_setup(), steps=_losses(series.steps)))
    return make_run(
        name,
        ranks=ranks,
        config={"sharding.strategy": "full_shard", "batch.micro": 4, "compile": False},
        environment={
            "torch": "2.11.0",
            "driver": "580.65.06",
            "nccl": None,
            "variables": {"NCCL_DEBUG": "WARN"},
        },
        sizes=ModelSizes(parameters=536_870_912, parameter_bytes=2 * GIB),
        warnings=("rank-00001.jsonl:7: line skipped (torn by a crash)",),
    )


_PHASE_SHARES = {"forward": 0.3, "backward": 0.6, "optimizer": 0.1}


def _setup() -> tuple[PhaseRecord, ...]:
    counters = MemoryCounters(allocated_bytes=1 * GIB, reserved_bytes=2 * GIB)
    return (
        PhaseRecord(step=-1, phase=Phase.INIT, end=MemoryCounters(allocated_bytes=0)),
        PhaseRecord(step=-1, phase=Phase.WRAP, end=counters, peak=counters),
    )


def _losses(steps: tuple[StepRecord, ...]) -> tuple[StepRecord, ...]:
    return tuple(replace(step, loss=7.5, loss_finite=True) for step in steps)


def checkpoint_run() -> Run:
    """Return a run that saved and loaded a checkpoint, gathered on rank 0, not restored on 1."""
    run = complete_run("gpt-checkpoint")
    ranks = tuple(_with_checkpoint(series) for series in run.ranks)
    return replace(run, manifest=replace(run.manifest, warnings=()), ranks=ranks)


def _with_checkpoint(series: RankSeries) -> RankSeries:
    first = series.rank == 0
    held, peak = 3 * GIB, (5 * GIB if first else 3 * GIB + 256 * MIB)
    end = MemoryCounters(allocated_bytes=held, reserved_bytes=8 * GIB)
    phases = tuple(
        PhaseRecord(
            step=6,
            phase=phase,
            end=end,
            peak=MemoryCounters(allocated_bytes=peak, reserved_bytes=8 * GIB),
            time_s=time_s,
        )
        for phase, time_s in ((Phase.CHECKPOINT_SAVE, 4.25), (Phase.CHECKPOINT_LOAD, 2.5))
    )
    record = CheckpointRecord(
        format="full",
        bytes_on_disk=6 * GIB,
        save_s=4.25,
        load_s=2.5,
        restored=first,
        host_before_bytes=2 * GIB,
        save_host_peak_bytes=(14 if first else 2) * GIB,
        load_host_peak_bytes=8 * GIB,
    )
    step = StepRecord(step=6, kind="checkpoint", phases=phases)
    return replace(series, steps=(*series.steps, step), checkpoint=record)


def one_rank_run() -> Run:
    """Return a run of one rank of 1024."""
    run = complete_run("one-rank")
    steps = tuple(replace(s, loss=None, loss_finite=None) for s in run.ranks[0].steps)
    manifest = replace(
        run.manifest, source="one_rank", world_size=1024, ranks=(0,), warnings=(), sizes=None
    )
    return Run(manifest=manifest, ranks=(replace(run.ranks[0], steps=steps, time_breakdown=()),))


def failed_run() -> Run:
    """Return a run whose rank 1 ran out of memory in the second step."""
    run = complete_run("gpt-oom")
    failure = Failure(
        kind="device_oom",
        message="CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of "
        "139.81 GiB of which 1.12 GiB is free.",
        rank=1,
        step=1,
        phase=Phase.BACKWARD,
        exit_code=1,
        frames=("torch/autograd/graph.py:865 _engine_run_backward", "train.py:31 step"),
        requested_bytes=2 * GIB,
        victims=(0,),
    )
    ranks = (
        replace(run.ranks[0], steps=run.ranks[0].steps[:2], finished=False, signal=15),
        replace(run.ranks[1], steps=run.ranks[1].steps[:1], finished=False, exit_code=1),
    )
    ranks = tuple(replace(r, anatomy=None, time_breakdown=()) for r in ranks)
    return Run(manifest=replace(run.manifest, status="failed", failure=failure), ranks=ranks)


def empty_run() -> Run:
    """Return a run that recorded nothing at all."""
    manifest = RunManifest(
        schema=1,
        name="empty",
        tool_version="0",
        created="2026-01-01T00:00:00Z",
        status="running",
        source="real_ranks",
        world_size=2,
        ranks=(),
        device_type="cpu",
    )
    return Run(manifest=manifest, ranks=())


def silent_rank_run() -> Run:
    """Return a run whose only rank recorded no step."""
    run = empty_run()
    return Run(manifest=replace(run.manifest, ranks=(0,)), ranks=(RankSeries(rank=0),))


def cpu_run() -> Run:
    """Return a run on CPU: counters in the observed step alone, nothing about a device."""
    return make_run("cpu", device_type="cpu", device_name=None, times=TIMES, timed_memory=False)


def many_ranks_run() -> Run:
    """Return a run of 64 ranks, more than are listed."""
    return make_run("many", world_size=64, times=TIMES)


def hostile_run() -> Run:
    """Return a run whose every free text is hostile."""
    run = complete_run(HOSTILE)
    ranks = []
    for series in run.ranks:
        assert series.anatomy is not None
        top = replace(TOP[0], module=HOSTILE, operator=HOSTILE, frames=(HOSTILE,))
        anatomy = replace(
            series.anatomy,
            categories={HOSTILE: 5 * GIB},
            resident={HOSTILE: 1},
            top_allocations=(top,),
            phases={HOSTILE: replace(series.anatomy.phases["forward"], categories={HOSTILE: GIB})},
        )
        ranks.append(replace(series, anatomy=anatomy, host=HOSTILE, device=HOSTILE))
    manifest = replace(
        run.manifest,
        device_name=HOSTILE,
        environment={HOSTILE: HOSTILE, "torch": HOSTILE},
        effective_config={HOSTILE: make_value(HOSTILE)},
        warnings=(HOSTILE,),
        status="failed",
        failure=Failure(kind=HOSTILE, message=HOSTILE, frames=(HOSTILE,)),
    )
    return Run(manifest=manifest, ranks=tuple(ranks))
