"""What a rank does from start to end. Imports torch."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from fsdp_doctor.config.megatron_native import with_live
from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import RunManifest
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.profiler.environment import collect_environment
from fsdp_doctor.profiler.observe import make_observer
from fsdp_doctor.profiler.observe.kernel_profile import KernelProfile
from fsdp_doctor.profiler.plan import LaunchPlan
from fsdp_doctor.profiler.recorder import OBSERVED_STEPS, Recorder
from fsdp_doctor.profiler.worker import join_process_group
from fsdp_doctor.runs.reader import load_manifest
from fsdp_doctor.runs.writer import write_manifest
from fsdp_doctor.training.checkpoints import save_and_load
from fsdp_doctor.training.megatron_job import MegatronJob
from fsdp_doctor.training.step import TrainingJob, build_job
from fsdp_doctor.training.strategies import RankContext

Job = TrainingJob | MegatronJob


def train(plan: LaunchPlan, rank: int, local_rank: int) -> int:
    """Train as the plan says, recording; return 0, or 1 when an exception ended it."""
    recorder: Recorder | None = None
    try:
        context = join_process_group(plan, rank, local_rank)
        observer = make_observer(context.device) if plan.observe else None
        recorder = Recorder(
            Path(plan.run_directory),
            rank=rank,
            device=context.device,
            observer=observer,
            keep_loss=not context.fake,
        )
        recorder.start(local_rank)
        spec = spec_from_mapping(dict(plan.spec), "plan")
        _run(plan, spec, context, recorder)
        recorder.close()
    except Exception as error:  # noqa: BLE001 (every exception of the user's job is a result)
        traceback.print_exc(file=sys.stderr)
        _write_failure(plan, rank, recorder, error)
        return 1
    with contextlib.suppress(RuntimeError):  # a peer that left first is no failure any more
        dist.destroy_process_group()
    return 0


def _write_failure(
    plan: LaunchPlan, rank: int, recorder: Recorder | None, error: Exception
) -> None:
    if recorder is None:
        recorder = Recorder(
            Path(plan.run_directory), rank=rank, device=torch.device("cpu"), observer=None
        )
    with contextlib.suppress(OSError):  # disk full: the exit code still tells
        recorder.fail(error)


class _PhasesOnly:
    """A phase sink that takes no note of batches."""

    def __init__(self, phase: Callable[[Phase, int], AbstractContextManager[None]]) -> None:
        self._phase = phase

    def phase(self, phase: Phase, microbatch: int = 0) -> AbstractContextManager[None]:
        """Pass the phase on."""
        return self._phase(phase, microbatch)

    def inputs(self, batch: Any) -> None:
        """Ignore the batch."""


def _run(plan: LaunchPlan, spec: ProfileSpec, context: RankContext, recorder: Recorder) -> None:
    if context.rank == plan.ranks[0]:
        _describe_machine(plan, context)
    job = build_job(spec, context, recorder)
    recorder.watch(job.model, job.optimizer)
    if context.rank == plan.ranks[0]:
        _complete_manifest(plan, spec, context, job, recorder)
    for _ in range(OBSERVED_STEPS):
        _untimed(plan, job, recorder, "observed" if plan.observe else "warmup")
    for _ in range(max(0, spec.steps.warmup - OBSERVED_STEPS)):
        _untimed(plan, job, recorder, "warmup")
    _timed_steps(plan, job, spec, recorder)
    if spec.checkpoint is not None:
        with recorder.step("checkpoint"):
            done = save_and_load(job, spec, context, recorder, Path(plan.run_directory))
        recorder.write("checkpoint", msgspec.to_builtins(done))
    if spec.steps.kernel_profile:
        with KernelProfile(context.device) as kernels:
            job.run_step(_PhasesOnly(kernels.phase))
        items = msgspec.to_builtins(kernels.breakdown())
        recorder.write("time_breakdown", {"items": items})


def _step(job: Job, recorder: Recorder, kind: Any) -> None:
    with recorder.step(kind):
        recorder.loss(job.run_step(recorder))


def _untimed(plan: LaunchPlan, job: Job, recorder: Recorder, kind: str) -> None:
    """Run an untimed step and write down its gradient norm, which means nothing on fake ranks."""
    _step(job, recorder, kind)
    if job.gradient_norm is not None and plan.one_rank_of is None:
        step = recorder.steps_done - 1
        recorder.write("gradient_norm", {"step": step, "value": float(job.gradient_norm)})


def _timed_steps(plan: LaunchPlan, job: Job, spec: ProfileSpec, recorder: Recorder) -> None:
    """Run the timed steps, and time them as a whole too (synchronised at both ends only)."""
    unrecorded = _PhasesOnly(lambda _phase, _microbatch: nullcontext())
    _synchronize(job.device)
    start = time.perf_counter()
    for _ in range(spec.steps.timed):
        if plan.record:
            _step(job, recorder, "timed")
        else:
            job.run_step(unrecorded)
    _synchronize(job.device)
    recorder.write("timed", {"total_s": time.perf_counter() - start, "steps": spec.steps.timed})


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _describe_machine(plan: LaunchPlan, context: RankContext) -> None:
    """Write device and environment into run.json, before anything is built that may fail."""
    directory = Path(plan.run_directory)
    environment = collect_environment(context.device)
    write_manifest(
        directory,
        replace(
            load_manifest(directory / "run.json"),
            device_type="cuda" if context.device.type == "cuda" else "cpu",
            device_name=environment["device_name"],
            environment=environment,
        ),
    )


def _complete_manifest(
    plan: LaunchPlan, spec: ProfileSpec, context: RankContext, job: Job, recorder: Recorder
) -> None:
    directory = Path(plan.run_directory)
    manifest: RunManifest = load_manifest(directory / "run.json")
    environment = dict(manifest.environment)
    effective = manifest.effective_config
    if isinstance(job, MegatronJob):
        live = job.live_config()
        environment["megatron_core"] = job.core_version
        recorder.write("megatron_config", live)
        effective = with_live(spec, effective, live)
    tokens = (
        spec.workload.micro_batch
        * spec.workload.sequence_length
        * spec.config.gradient_accumulation.steps
        * context.world_size
    )
    write_manifest(
        directory,
        replace(
            manifest,
            sizes=job.sizes,
            environment=environment,
            effective_config=effective,
            tokens_per_step=tokens,
        ),
    )
