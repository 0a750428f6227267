"""Lets Megatron-Core, which is written for CUDA and NCCL, run on CPU processes with gloo.

For correctness only (losses, gradients, checkpoints): streams and events do nothing, so times mean
nothing, and there is no allocator to ask. Install it before ``megatron.core`` is imported, in a
process of its own: it replaces names of ``torch`` and is never taken back.

Collectives are done one by one when they are called, whatever was asked for: Megatron-FSDP frees
what it gathered in the order of streams, of which gloo's threads know nothing. (With torch's own
coalesced asynchronous ones 8 of 11 runs of 400 steps of ZeRO-3 ended in a corrupt heap, with these
none of 8; core 0.16.1, torch 2.13.)

Private names replaced (torch 2.6 - 2.14): ``torch.cuda._lazy_init``, ``torch.cuda._lazy_call``,
``torch.cuda.random._lazy_init``; ``torch.distributed._coalescing_manager``, ``_all_gather_base``,
``_reduce_scatter_base``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed.device_mesh as mesh_module
from torch.distributed import distributed_c10d

_FACTORIES = (
    "empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "as_tensor",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "linspace",
    "empty_strided",
)  # fmt: skip
_NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
_NOTHING = (
    "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "_lazy_init",
    "_lazy_call", "manual_seed", "manual_seed_all",
)  # fmt: skip
_ZERO = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_COLLECTIVES = (
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "_all_gather_base",
    "_reduce_scatter_base",
)  # fmt: skip
_installed = False
_gpu = torch.device("cpu")
"""What stands for the GPU."""


class _Quiet:
    """A CUDA stream or event on which everything has already happened."""

    device = torch.device("cpu")
    stream_id = 0
    cuda_stream = 0

    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_a, **_k: None

    def record_event(self, *_arguments: Any) -> _Quiet:
        """Return an event that has happened."""
        return self

    def query(self) -> bool:
        """Return True: it has happened."""
        return True

    def elapsed_time(self, _other: object) -> float:
        """Return no time."""
        return 0.0

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *_exception: object) -> None: ...


class _Properties:
    """What Megatron asks of a device (a Hopper)."""

    name, major, minor = "cpu", 9, 0
    total_memory, multi_processor_count = 1 << 40, 1


def install(gpu: torch.device | None = None) -> None:
    """Map CUDA onto the CPU, or onto ``gpu``, in this process; a second call does nothing."""
    global _installed, _gpu  # noqa: PLW0603 (one process, one state)
    if _installed:
        return
    _installed = True
    if gpu is not None:
        _gpu = gpu
    _replace_cuda()
    _replace_factories()
    _replace_tensor_methods()
    _replace_modules_and_meshes()
    _replace_collectives()


def _on_gpu(device: Any) -> Any:
    """Return what stands for the GPU for any spelling of a CUDA device; others as they are."""
    if isinstance(device, torch.device):
        return _gpu if device.type == "cuda" else device
    if isinstance(device, bool):
        return device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return _gpu
    return device


def on_gpu(device: Any) -> bool:
    """Whether a device, in any spelling, means the GPU."""
    return bool(_on_gpu(device) == _gpu)


def _mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = _on_gpu(options["device"])
        options.pop("pin_memory", None)
        return function(*arguments, **options)

    return call


def _replace_cuda() -> None:
    cuda: Any = torch.cuda
    for name in _NOTHING:
        setattr(cuda, name, lambda *_a, **_k: None)
    for name in _ZERO:
        setattr(cuda, name, lambda *_a, **_k: 0)
    quiet = _Quiet()
    cuda.Stream = cuda.Event = cuda.ExternalStream = _Quiet
    cuda.current_stream = cuda.default_stream = lambda *_a, **_k: quiet
    cuda.stream = lambda *_a, **_k: nullcontext()
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.is_available = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_capability = lambda *_a: (9, 0)
    cuda.get_device_properties = lambda *_a: _Properties
    cuda.get_rng_state = lambda *_a, **_k: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_a: None
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.random.set_rng_state = cuda.set_rng_state
    cuda.random._lazy_init = lambda: None  # noqa: SLF001
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is not None:
        accelerator.current_accelerator = lambda *_a, **_k: None
        accelerator.is_available = lambda: False
        accelerator.current_stream = lambda *_a, **_k: quiet
        accelerator.current_device_index = lambda: 0
        accelerator.synchronize = lambda *_a, **_k: None


def _replace_factories() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _mapped(getattr(torch, name)))


def _replace_tensor_methods() -> None:
    tensor: Any = torch.Tensor
    for name in _NEW:
        setattr(tensor, name, _mapped(getattr(tensor, name)))
    plain_to, plain_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if "device" in options:
            options["device"] = _on_gpu(options["device"])
        return plain_to(self, *map(_on_gpu, arguments), **options)

    def kind(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        result = plain_type(self, *arguments, **options)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    tensor.to, tensor.type = to, kind
    tensor.cuda = lambda self, *_a, **_k: plain_to(self, _gpu)
    tensor.pin_memory = lambda self, *_a, **_k: self
    tensor.record_stream = lambda *_a, **_k: None


def _replace_modules_and_meshes() -> None:
    module: Any = torch.nn.Module
    plain_to = module.to
    module.cuda = lambda self, *_a, **_k: plain_to(self, _gpu)
    module.to = lambda self, *a, **k: plain_to(
        self, *map(_on_gpu, a), **{n: _on_gpu(v) for n, v in k.items()}
    )
    meshes: Any = mesh_module
    from_group = meshes.DeviceMesh.from_group
    plain_init = meshes.init_device_mesh

    def grouped(group: Any, _device_type: str = "cpu", *arguments: Any, **options: Any) -> Any:
        options.pop("device_type", None)
        return from_group(group, "cpu", *arguments, **options)

    def made(device_type: str, *arguments: Any, **options: Any) -> Any:
        return plain_init("cpu" if device_type == "cuda" else device_type, *arguments, **options)

    meshes.DeviceMesh.from_group = staticmethod(grouped)
    distributed: Any = torch.distributed
    meshes.init_device_mesh = distributed.init_device_mesh = made


class _Done:
    """The handle of a collective that is done."""

    def wait(self, *_arguments: Any) -> bool:
        """Return at once."""
        return True


@contextmanager
def _one_by_one(*_arguments: Any, **_options: Any) -> Iterator[_Done]:
    yield _Done()


def _replace_collectives() -> None:
    for module in (torch.distributed, distributed_c10d):
        holder: Any = module
        holder._coalescing_manager = _one_by_one  # noqa: SLF001
        for name in _COLLECTIVES:
            if hasattr(holder, name):
                setattr(holder, name, _at_once(getattr(holder, name)))


def _at_once(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*arguments: Any, async_op: bool = False, **options: Any) -> _Done | None:
        collective(*arguments, **options)
        return _Done() if async_op else None

    return call
