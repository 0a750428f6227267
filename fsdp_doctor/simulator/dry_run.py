"""Run the training step of a spec on fake tensors, in a process of its own (``child``).

The process patches torch and is good for one spec only, with any number of layers.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from fsdp_doctor.config.megatron_check import STRATEGIES as MEGATRON
from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.errors import InputError
from fsdp_doctor.gpus_table import HOPPER_WORKSPACE
from fsdp_doctor.memory.allocator_conf import parse_alloc_conf
from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.simulator import compat, cuda_autocast, cuda_like, megatron_fakes
from fsdp_doctor.simulator.private_api import check_private_api
from fsdp_doctor.simulator.request import DryRunAnswer, DryRunRequest
from fsdp_doctor.simulator.short_cut import Simulated, simulate_layers
from fsdp_doctor.simulator.summarise import summarise
from fsdp_doctor.simulator.tracker import FakeObserver
from fsdp_doctor.training.step import build_job
from fsdp_doctor.training.strategies import RankContext

STRATEGIES = ("ddp", "fsdp1", "fsdp2", *MEGATRON)
"""What runs on fake tensors."""


class _Sink:
    """Passes phases and batches of the training step to the observer."""

    def __init__(self, observer: FakeObserver) -> None:
        self._observer = observer
        self.step = -1

    @contextmanager
    def phase(self, phase: Phase, microbatch: int = 0) -> Iterator[None]:
        """Mark a phase."""
        self._observer.begin_phase(self.step, phase, microbatch)
        yield
        self._observer.end_phase()

    def inputs(self, batch: Any) -> None:
        """Label a batch."""
        self._observer.inputs(batch)


def dry_run(
    spec: ProfileSpec, *, rank: int, world_size: int, steps: int, workspace_bytes: int
) -> Simulated:
    """Build the job of ``spec`` and run ``steps`` steps of it.

    All calls in a process must have ``rank`` and ``world_size`` in common, and the strategy.

    Raises InputError when the spec asks for what cannot run on fake tensors.
    """
    _refuse_unsupported(spec)
    megatron_fakes.prepare(spec)
    observer = FakeObserver(workspace_bytes)
    compat.join_fake_group(rank, world_size)
    compat.install(observer)
    cuda_like.install(observer.work.kernel, hopper=workspace_bytes >= HOPPER_WORKSPACE)
    cuda_autocast.install()
    context = RankContext(
        rank=rank, local_rank=0, world_size=world_size, device=compat.GPU, fake=True
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
            if step == 0 and megatron_fakes.offloads(spec):
                gc.collect()
        observer.stop()
    _count_reductions(observer, spec)
    return Simulated(observer.log, observer.streams, observer.work.work())


def _count_reductions(observer: FakeObserver, spec: ProfileSpec) -> None:
    """Tell the counter of work what DDP's reducer sends: no operator shows it."""
    if spec.config.strategy != "ddp":
        return
    accumulation = spec.config.gradient_accumulation
    times = accumulation.steps if accumulation.sync == "every_microbatch" else 1
    part = 1 if spec.config.ddp.comm_hook == "none" else 2
    sizes = [size // part for size in observer.work.buckets]
    observer.work.reduce_buckets(sizes, spec.world_size, times)


def _refuse_unsupported(spec: ProfileSpec) -> None:
    if spec.config.strategy not in STRATEGIES:
        raise InputError(
            f"strategy {spec.config.strategy} cannot be estimated yet",
            where="config.strategy",
            hint=f"one of: {', '.join(STRATEGIES)}",
        )
    if spec.config.strategy in MEGATRON:
        megatron_fakes.refuse_unsupported(spec)
    if spec.config.compile:
        raise InputError(
            "compiled blocks cannot be estimated: Inductor plans their memory itself",
            where="config.compile",
            hint="--set config.compile=false estimates the eager job",
        )


def answer(request: DryRunRequest) -> DryRunAnswer:
    """Carry out a request of the command."""
    try:
        settings = parse_alloc_conf(request.alloc_conf)
        spec = spec_from_mapping(request.spec, "spec")
        _refuse_unsupported(spec)
        check_private_api(spec.config.strategy)
        run = simulate_layers(spec, partial(_simulate, request), every_layer=request.every_layer)
    except InputError as error:
        return DryRunAnswer(input_error=str(error))
    if request.expandable_segments:
        settings = replace(settings, expandable_segments=True)
    estimate = summarise(
        run.log,
        run.streams,
        rank=request.rank,
        settings=settings,
        capacities=request.capacities,
    )
    return DryRunAnswer(estimate=replace(estimate, work=run.work, layers=run.layers))


def _simulate(request: DryRunRequest, spec: ProfileSpec) -> Simulated:
    return dry_run(
        spec,
        rank=request.rank,
        world_size=spec.world_size,
        steps=request.steps,
        workspace_bytes=request.workspace_bytes,
    )


def main() -> int:
    """Read a request, write its answer."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=DryRunRequest)
    output, sys.stdout = sys.stdout, sys.stderr  # what the user's model prints is not the answer
    output.buffer.write(msgspec.json.encode(answer(request)))
    output.flush()
    return 0
