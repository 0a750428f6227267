"""Megatron-Core on fake tensors: its own code runs, on the simulated GPU, as one rank of any job.

The shim that lets Megatron run on CPU processes (``training.megatron_cpu``) stands in for CUDA,
with the simulated GPU and its streams in its place. What is left is what Megatron asks of data and
of other ranks: ranks are taken to be alike, numbers read from fake tensors are ones, checks across
ranks pass.

Replaced, in a process that is good for one spec only (megatron-core 0.16 - 0.19):
``torch.distributed.all_gather_object, broadcast_object_list``, ``torch.tensor``,
``DeviceMesh.from_group``, ``mcore_fsdp_adapter.FullyShardedDataParallel._init_dist_index`` and
``FSDPDistributedIndex.get_logical_hybrid_fsdp_rank`` (they compute with ranks, which need values),
``validate_uneven_dtensor`` of ``megatron_fsdp.param_and_grad_buffer``.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from fsdp_doctor.config.megatron_check import STRATEGIES
from fsdp_doctor.config.megatron_support import refuse
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.simulator import compat
from fsdp_doctor.training import megatron_cpu
from fsdp_doctor.training.megatron_setup import load_megatron

_FSDP = "megatron.core.distributed.fsdp"


def refuse_unsupported(spec: ProfileSpec) -> None:
    """Raise InputError for what the installed Megatron cannot run, or fakes cannot stand in for."""
    refuse(spec)


def offloads(spec: ProfileSpec) -> bool:
    """Whether Megatron updates weights on the host (``HybridDeviceOptimizer``).

    It builds its copies of the weights twice; the first ones hang in reference cycles until Python
    collects. ``dry_run`` collects after the first step: recorded jobs did in the course of it.
    """
    return spec.config.strategy == "megatron" and (
        spec.config.megatron.optimizer.optimizer_cpu_offload
    )


def prepare(spec: ProfileSpec) -> None:
    """Make Megatron importable and let it run on fakes; nothing for other strategies.

    Raises MissingDependencyError when megatron-core is not installed.
    """
    if spec.config.strategy not in STRATEGIES:
        return
    megatron_cpu.install(compat.GPU)
    _simulate_streams()
    if offloads(spec):
        tensor: Any = torch.Tensor
        tensor.is_cuda = property(lambda own: own.device == compat.GPU)
    for module in (dist, distributed_c10d):
        holder: Any = module
        holder.all_gather_object = _all_alike
        holder.broadcast_object_list = lambda *_arguments, **_options: None
    mesh: Any = DeviceMesh
    mesh.from_group = staticmethod(compat.unfaked(mesh.from_group))
    _read_ones()
    if spec.config.strategy == "megatron":  # the standalone package is imported by its strategy
        load_megatron(compat.GPU)
        _patch_fsdp()


class _Event:
    """Makes the simulator's events, which are installed later."""

    def __new__(cls, *_arguments: Any, **_options: Any) -> Any:
        return torch.cpu.Event()


def _simulate_streams() -> None:
    """Megatron's CUDA streams are those that the simulator keeps apart (``streams``)."""
    stream: Any = torch.cpu.Stream
    stream.__init__ = lambda _self, *_arguments, **_options: None
    stream.device, stream.stream_id, stream.cuda_stream = compat.GPU, 0, 0
    stream.query = lambda _self: True
    default = torch.cpu.current_stream()
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = stream, _Event

    def on_stream(chosen: Any) -> Any:
        return torch.cpu.StreamContext(chosen)  # replaced after this

    cuda.stream = on_stream
    cuda.current_stream = lambda *_arguments: torch.cpu.current_stream()
    cuda.default_stream = lambda *_arguments: default


def _all_alike(found: list[Any], own: Any, group: Any = None) -> None:  # noqa: ARG001
    """Every rank sends what this one sends."""
    found[:] = [own] * len(found)


def _read_ones() -> None:
    """``torch.tensor`` reads numbers out of the tensors in a list: they have none.

    What it makes is a constant on the host, whatever device was asked for: fake mode lifts it so.
    """
    plain = torch.tensor

    def tensor(data: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        values = _ones(data) if isinstance(data, (list, tuple)) else data
        made: torch.Tensor = plain(values, *arguments, **options)
        if not megatron_cpu.on_gpu(options.get("device")):
            return made
        return torch.empty(
            made.shape, dtype=made.dtype, device=compat.GPU, requires_grad=made.requires_grad
        )

    torch.tensor = tensor


def _ones(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_ones(item) for item in value]
    return 1.0 if isinstance(value, torch.Tensor) else value


def _patch_fsdp() -> None:
    adapter = importlib.import_module(f"{_FSDP}.mcore_fsdp_adapter").FullyShardedDataParallel
    adapter._init_dist_index = compat.unfaked(adapter._init_dist_index)  # noqa: SLF001
    index: Any = importlib.import_module(f"{_FSDP}.src.megatron_fsdp.utils").FSDPDistributedIndex
    if hasattr(index, "get_logical_hybrid_fsdp_rank"):
        index.get_logical_hybrid_fsdp_rank = compat.unfaked(index.get_logical_hybrid_fsdp_rank)
    buffers: Any = importlib.import_module(f"{_FSDP}.src.megatron_fsdp.param_and_grad_buffer")
    if hasattr(buffers, "validate_uneven_dtensor"):
        buffers.validate_uneven_dtensor = lambda *_arguments, **_options: None
