"""The dry run of a job on CPUs: what the CPU tracker would count, on fake tensors.

Operators stay as torch decomposes them on a CPU; sizes are those asked for, nothing is reserved.
Like ``dry_run``, this patches torch and is good for one spec in one process.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import clip_grad
from torch.optim import optimizer
from torch.utils import _foreach_utils

from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.errors import InputError
from fsdp_doctor.memory.events import EventLog
from fsdp_doctor.memory.timeline import build_anatomy
from fsdp_doctor.model.estimate import PhaseEstimate, RankEstimate, StepEstimate
from fsdp_doctor.model.memory import Anatomy
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.simulator import compat, megatron_fakes
from fsdp_doctor.simulator.dry_run import _refuse_unsupported, _Sink
from fsdp_doctor.simulator.request import DryRunAnswer, DryRunRequest
from fsdp_doctor.simulator.summarise import SOURCE
from fsdp_doctor.simulator.tracker import FakeObserver
from fsdp_doctor.training.step import build_job
from fsdp_doctor.training.strategies import RankContext

_FOREACH_DEVICES = "_get_foreach_kernels_supported_devices"


class _CpuRunObserver(FakeObserver):
    """Sees what the CPU tracker sees: no workspace, no scratch of kernels."""

    def __init__(self) -> None:
        super().__init__(workspace_bytes=0)

    @contextmanager
    def inside(self, operator: Any, steps: Sequence[int]) -> Iterator[None]:  # noqa: ARG002
        """Log nothing: scratch inside CPU kernels is invisible to the tracker too."""
        yield


def _install(observer: FakeObserver) -> None:
    """Patch torch as for a GPU, but let it choose optimizer loops as on a CPU."""
    owners = (_foreach_utils, optimizer, clip_grad)
    devices = [(o, getattr(o, _FOREACH_DEVICES)) for o in owners if hasattr(o, _FOREACH_DEVICES)]
    compat.install(observer)
    for owner, original in devices:
        setattr(owner, _FOREACH_DEVICES, original)
    optimizer._foreach_supported_types.remove(FakeTensor)


def dry_run_on_cpu(spec: ProfileSpec, *, rank: int, steps: int) -> EventLog:
    """Build the job of ``spec`` and run ``steps`` steps of one rank. Call once per process.

    Raises InputError when the spec asks for what cannot run on fake tensors.
    """
    _refuse_unsupported(spec)
    megatron_fakes.prepare(spec)
    observer = _CpuRunObserver()
    compat.join_fake_group(rank, spec.world_size)
    _install(observer)
    context = RankContext(
        rank=rank, local_rank=0, world_size=spec.world_size, device=compat.GPU, fake=True
    )
    sink = _Sink(observer)
    with compat.fake_mode():
        observer.start()
        job = build_job(spec, context, sink)
        observer.watch(job.model, job.optimizer)
        for step in range(steps):
            sink.step = step
            loss = job.run_step(sink)
            del loss
        observer.stop()
    return observer.log


def answer_on_cpu(request: DryRunRequest) -> DryRunAnswer:
    """Carry out a request; reserved memory is 0, since CPU tensors come from no pool."""
    try:
        spec = spec_from_mapping(request.spec, "spec")
        log = dry_run_on_cpu(spec, rank=request.rank, steps=request.steps)
    except InputError as error:
        return DryRunAnswer(input_error=str(error))
    steady = build_anatomy(log, request.steps - 1, source=SOURCE)
    first = build_anatomy(log, 0, source=SOURCE)
    return DryRunAnswer(
        estimate=RankEstimate(
            rank=request.rank,
            first_step=_step(first),
            steady=_step(steady),
            top_allocations=steady.top_allocations,
            setup_peak_bytes=0,
            events=log.position,
        )
    )


def _step(anatomy: Anatomy) -> StepEstimate:
    return StepEstimate(
        peak_allocated_bytes=anatomy.peak_allocated_bytes,
        peak_reserved_bytes=0,
        peak_reserved_low_bytes=0,
        peak_phase=anatomy.peak_phase,
        resident_bytes=sum(anatomy.resident.values()),
        resident=dict(anatomy.resident),
        categories=dict(anatomy.categories),
        phases={
            name: PhaseEstimate(
                peak_allocated_bytes=part.peak_allocated_bytes,
                peak_reserved_bytes=0,
                end_allocated_bytes=part.end_allocated_bytes,
                categories=dict(part.categories),
            )
            for name, part in anatomy.phases.items()
        },
    )
