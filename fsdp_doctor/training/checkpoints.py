"""Save a checkpoint and load it again, as the engine's users do, in phases of their own.

Formats: ``torch_dcp`` (``torch.distributed.checkpoint`` of the sharded state), ``full`` (the whole
state on rank 0), ``torch_dist`` and ``fsdp_dtensor`` (Megatron's, see ``megatron_checkpoints``).
"""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp_module
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import CheckpointRecord, ModelSizes
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.training.host_memory import HostPeak
from fsdp_doctor.training.sinks import PhaseSink
from fsdp_doctor.training.strategies.base import RankContext

_DCP: Any = dcp_module
_BYTES_PER_PARAMETER = 20
"""Parameter, master copy, two moments and a gradient copy at most; asked of the disk before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """How one format saves and loads."""

    save: Callable[[Path], None]
    load: Callable[[Path], None]
    prepare: Callable[[], None] = lambda: None
    """What must be brought up to date before."""


def save_and_load(
    job: Any, spec: ProfileSpec, context: RankContext, sink: PhaseSink, run_directory: Path
) -> CheckpointRecord:
    """Save, erase the parameters, load; phases ``checkpoint_save`` and ``checkpoint_load``.

    The checkpoint lies in the run directory meanwhile. Raises InputError when the disk is too full.
    """
    assert spec.checkpoint is not None
    folder = run_directory / "checkpoint"
    _check_disk(run_directory, job.sizes, context)
    saver = _saver(job, spec, context)
    saver.prepare()
    before = _fingerprint(job.model)
    saving, reading = HostPeak(), HostPeak()
    start = time.perf_counter()
    with sink.phase(Phase.CHECKPOINT_SAVE), _as_exception(), saving:
        saver.save(folder)
    saved = time.perf_counter()
    dist.barrier()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    _erase(job.model)
    loading = time.perf_counter()
    with sink.phase(Phase.CHECKPOINT_LOAD), _as_exception(), reading:
        saver.load(folder)
    loaded = time.perf_counter()
    restored = _fingerprint(job.model) == before
    dist.barrier()
    _end_writers()
    if context.rank == 0 or context.fake:
        shutil.rmtree(folder, ignore_errors=True)
    return CheckpointRecord(
        format=spec.checkpoint,
        bytes_on_disk=size,
        save_s=saved - start,
        load_s=loaded - loading,
        restored=restored,
        host_before_bytes=saving.before_bytes,
        save_host_peak_bytes=saving.peak_bytes,
        load_host_peak_bytes=reading.peak_bytes,
    )


@contextmanager
def _as_exception() -> Iterator[None]:
    """Torch's ``CheckpointException`` is a BaseException; make it one that ends as others do."""
    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()), None)
        cause = first[0] if isinstance(first, tuple) else first
        raise RuntimeError(f"checkpoint: {type(cause).__name__}: {cause}") from error


def _end_writers() -> None:
    """End the processes that Megatron's writer leaves behind: a rank exits without clean-up."""
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()


def _saver(job: Any, spec: ProfileSpec, context: RankContext) -> Saver:
    if spec.config.strategy == "megatron":
        from fsdp_doctor.training.megatron_checkpoints import megatron_saver

        return megatron_saver(job, spec, context)
    if spec.config.strategy == "megatron_fsdp":
        return _plain_saver(job, context)
    if spec.checkpoint == "full":
        return _full_saver(job, context)
    return _sharded_saver(job, context)


def _sharded_saver(job: Any, context: RankContext) -> Saver:
    """``torch.distributed.checkpoint`` of what each rank holds."""

    def save(folder: Path) -> None:
        model, optimizer = get_state_dict(job.model, job.optimizer)
        write_dcp({"model": model, "optimizer": optimizer}, folder, context)

    def load(folder: Path) -> None:
        model, optimizer = get_state_dict(job.model, job.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        read_dcp(state, folder, context)
        set_state_dict(
            job.model,
            job.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    return Saver(save=save, load=load)


def _full_saver(job: Any, context: RankContext) -> Saver:
    """The whole state gathered on rank 0, written by ``torch.save``, read by every rank."""
    # with memory of the CPU, FSDP1 frees what it has just "moved" there (torch 2.13)
    offload = context.device.type != "cpu"
    gather = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    spread = StateDictOptions(full_state_dict=True)

    def save(folder: Path) -> None:
        model, optimizer = get_state_dict(job.model, job.optimizer, options=gather)
        if context.rank == 0:
            folder.mkdir(exist_ok=True)
            torch.save({"model": model, "optimizer": optimizer}, folder / "full.pt")
        dist.barrier()

    def load(folder: Path) -> None:
        state = torch.load(folder / "full.pt", map_location="cpu", weights_only=True)
        set_state_dict(
            job.model,
            job.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=spread,
        )

    return Saver(save=save, load=load)


def _plain_saver(job: Any, context: RankContext) -> Saver:
    """The state dicts that model and optimizer give themselves (DTensors), by torch's DCP."""

    def state() -> dict[str, Any]:
        return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}

    def load(folder: Path) -> None:
        loaded = state()
        read_dcp(loaded, folder, context)
        job.model.load_state_dict(loaded["model"], strict=False)
        job.optimizer.load_state_dict(loaded["optimizer"])

    return Saver(save=lambda folder: write_dcp(state(), folder, context), load=load)


def write_dcp(state: dict[str, Any], folder: Path, context: RankContext) -> None:
    """Write a state dict by ``torch.distributed.checkpoint``; alone under a fake group."""
    _DCP.save(state, checkpoint_id=str(folder), no_dist=context.fake)


def read_dcp(state: dict[str, Any], folder: Path, context: RankContext) -> None:
    """Read into the tensors of a state dict."""
    _DCP.load(state, checkpoint_id=str(folder), no_dist=context.fake)


def _parameters(model: torch.nn.Module) -> list[torch.Tensor]:
    """The memory that holds this rank's parameters: local parts of sharded tensors."""
    found = []
    whole: Any = model
    held: Iterator[torch.Tensor] = model.parameters()
    if vars(model).get("param_and_grad_buffer") is not None:  # Megatron-FSDP's main weights
        saved = whole.state_dict_for_save_checkpoint()
        held = (value for value in saved.values() if isinstance(value, torch.Tensor))
    for parameter in held:
        local = getattr(parameter, "_local_tensor", parameter)
        found.append(local.detach())
    return found


def _fingerprint(model: torch.nn.Module) -> list[float]:
    """Sums over this rank's parameters."""
    return [float(tensor.double().sum()) for tensor in _parameters(model) if tensor.numel()]


def _erase(model: torch.nn.Module) -> None:
    for tensor in _parameters(model):
        tensor.zero_()


def _check_disk(folder: Path, sizes: ModelSizes, context: RankContext) -> None:
    needed = sizes.parameters * _BYTES_PER_PARAMETER
    free = shutil.disk_usage(folder).free
    if free < needed and context.rank == 0:
        raise InputError(
            f"a checkpoint may need {needed} bytes, {free} are free",
            where=str(folder),
            hint="choose another -o",
        )
