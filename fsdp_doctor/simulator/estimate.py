"""Ask a child process what a spec's ranks would allocate. No torch here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from fsdp_doctor.config.megatron_native import installed_core
from fsdp_doctor.errors import DoctorError, InputError, MissingDependencyError
from fsdp_doctor.gpus_table import GIB, GpuModel
from fsdp_doctor.model.estimate import Estimate, RankEstimate
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.model.work import StepTimeGuess
from fsdp_doctor.simulator.request import DryRunAnswer, DryRunRequest
from fsdp_doctor.simulator.roofline import guess_step_time

STEADY_STEPS = {"ddp": 3, "fsdp1": 3, "fsdp2": 2, "megatron": 2, "megatron_fsdp": 2}
"""Steps until nothing changes: the first makes optimizer state, in DDP's second buckets are new;
FSDP1's segments on the stream that gathers settle in the third."""

CONTEXT_BYTES = (int(0.70 * GIB), int(0.95 * GIB))
"""CUDA context and loaded kernels: 0.75 - 0.83 GiB on an H200 (torch 2.11, 444 samples)."""
COMMUNICATOR_BYTES = int(0.80 * GIB)
"""What NCCL adds with a few communicators: 0.7 GiB between two H200s; more with more groups."""

_ASSUMPTIONS = (
    "eager torch operators; a custom kernel's inner scratch memory is not seen",
    "attention by cuDNN on Hopper and newer (from torch 2.11), else flash, else memory-efficient",
    "nothing else runs on the GPU, and the data loader leaves nothing there",
)
_FSDP1 = (
    "FSDP1 gives blocks back when other streams are done: reserved is predicted for a host that "
    "runs ahead of the GPU; peak_reserved_low_bytes is for one that does not"
)
_MEGATRON = (
    "megatron-core {} as installed here, with its local layers; runs of 0.19.2 are what it was "
    "checked against"
)
_STANDALONE = (
    "the standalone megatron_fsdp as installed here; runs of 0.6.1 are what it was checked against"
)
_OFFLOAD = "offloaded state lies in host memory, which is not counted"


def estimate(
    spec: ProfileSpec,
    *,
    gpu: GpuModel,
    memory_bytes: int | None = None,
    ranks: Sequence[int] = (0,),
    expandable_segments: bool = False,
    alloc_conf: str = "",
    every_layer: bool = False,
    tell: Callable[[str], None] = lambda _text: None,
    run: Callable[[DryRunRequest], RankEstimate] | None = None,
) -> Estimate:
    """Simulate ``ranks`` of ``spec`` and judge whether they fit.

    ``run``: carries out a dry run; else each has a process of its own (``simulate``).

    Raises InputError for a spec or rank that cannot be used, DoctorError when the dry run fails.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("torch", "run the training step on fake tensors", "profile")
    total = gpu.memory_bytes if memory_bytes is None else memory_bytes
    outside = outside_pytorch(spec)
    found = []
    for rank in ranks:
        if not 0 <= rank < spec.world_size:
            raise InputError(f"rank {rank} is not one of {spec.world_size}", where="--rank")
        tell(f"rank {rank} of {spec.world_size}: simulating")
        request = DryRunRequest(
            spec=msgspec.to_builtins(spec),
            rank=rank,
            steps=STEADY_STEPS.get(spec.config.strategy, 1),
            workspace_bytes=gpu.cublas_workspace_bytes,
            capacities=tuple(total - used for used in outside),
            expandable_segments=expandable_segments,
            alloc_conf=alloc_conf,
            every_layer=every_layer,
        )
        found.append((run or simulate)(request))
    highest = max(rank.steady.peak_reserved_bytes for rank in found)
    return Estimate(
        world_size=spec.world_size,
        gpu=gpu.name,
        memory_bytes=total,
        fits=_verdict(found, total, outside),
        headroom_bytes=total - outside[1] - highest,
        method="simulated",
        assumptions=(*_assumptions(spec), *_layers(found)),
        outside_pytorch_bytes=outside,
        ranks=tuple(found),
        step_time=_step_time(found, gpu),
    )


def _step_time(ranks: Sequence[RankEstimate], gpu: GpuModel) -> StepTimeGuess | None:
    guesses = [guess_step_time(rank.work, gpu.speed) for rank in ranks if rank.work is not None]
    return max(guesses, key=lambda guess: guess.total.high_s, default=None)


def outside_pytorch(spec: ProfileSpec) -> tuple[int, int]:
    """Return the range of what a rank's process takes beside torch's allocator."""
    communicates = COMMUNICATOR_BYTES if spec.world_size > 1 else 0
    return CONTEXT_BYTES[0], CONTEXT_BYTES[1] + communicates


def simulate(request: DryRunRequest) -> RankEstimate:
    """Run one rank in a child process.

    Raises InputError for what the user can mend, DoctorError for any other failure.
    """
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_doctor.simulator.child"],
        input=msgspec.json.encode(request),
        capture_output=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise DoctorError(
            f"the dry run failed (exit {done.returncode}): {lines[-1] if lines else 'no message'}"
        )
    answer = msgspec.json.decode(done.stdout, type=DryRunAnswer)
    if answer.estimate is None:
        raise InputError(answer.input_error or "the dry run gave no estimate")
    return answer.estimate


def _verdict(ranks: Sequence[RankEstimate], total: int, outside: tuple[int, int]) -> bool | None:
    roomy, tight = (str(total - used) for used in outside)
    if all(rank.fits[tight] for rank in ranks):
        return True
    if not all(rank.fits[roomy] for rank in ranks):
        return False
    return None


def _assumptions(spec: ProfileSpec) -> tuple[str, ...]:
    found: tuple[str, ...] = _ASSUMPTIONS
    if spec.config.strategy == "fsdp1":
        found = (*found, _FSDP1)
    if spec.config.strategy == "megatron":
        found = (*found, _MEGATRON.format(installed_core()))
        if spec.config.megatron.optimizer.optimizer_cpu_offload:
            found = (*found, _OFFLOAD)
    if spec.config.strategy == "megatron_fsdp":
        found = (*found, _STANDALONE)
    offload = spec.config.fsdp1.cpu_offload if spec.config.strategy == "fsdp1" else None
    if spec.config.strategy == "fsdp2" and spec.config.fsdp2.offload_policy:
        found = (*found, _OFFLOAD)
    if offload is not None and offload.offload_params:
        found = (*found, _OFFLOAD)
    return found


def _layers(ranks: Sequence[RankEstimate]) -> list[str]:
    """What is to say about layers, once."""
    return list(dict.fromkeys(rank.layers for rank in ranks if rank.layers is not None))


def with_world_size(spec: ProfileSpec, world_size: int | None) -> ProfileSpec:
    """Return the spec for another number of ranks."""
    return spec if world_size is None else replace(spec, world_size=world_size)
