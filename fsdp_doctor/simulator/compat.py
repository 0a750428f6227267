"""Every private torch API the simulator needs, and the patches that let training run on fakes.

For a child process of its own: nothing is put back. The simulated GPU is ``cpu:0`` and the host is
``cpu``: fake tensors keep the two apart by torch's own rules (copies, zero-dimensional operands,
errors on a mix), and the CPU build's autograd and process group serve both.

Private (torch 2.13 and 2.14):

* ``torch._subclasses.fake_tensor``, ``FakeTensor.fake_device``, ``fake_pg.FakeStore``,
  ``torch.utils._python_dispatch._disable_current_modes``, methods of ``DeviceMesh``;
* FSDP2: ``_fsdp_init._get_device_from_mesh, _get_post_forward_mesh_info``,
  ``_fsdp_param._chunk_with_empty``;
* FSDP1: ``_flat_param._data_ptr_allocated, _same_storage``, ``_init_utils._get_compute_device``,
  ``_common_utils._no_dispatch_record_stream``;
* DDP: ``DistributedDataParallel.reducer``, ``_verify_param_shape_across_processes``,
  ``torch.distributed._compute_bucket_assignment_by_size``;
* optimizers: ``optimizer._foreach_supported_types``, ``GradScaler._maybe_opt_step``,
  ``_foreach_utils._get_foreach_kernels_supported_devices``;
* ``torch.cpu.Event``, ``torch.utils.weakref`` (``swap_tensors`` refuses tensors that fake mode
  remembers); streams: ``streams.py``.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_doctor.simulator import fake_keys, old_collectives, streams
from fsdp_doctor.training.strategies import base

c10d: Any = dist  # its private names are not in its stubs

GPU = torch.device("cpu", 0)
HOST = torch.device("cpu")


class Watcher(Protocol):
    """Whoever wants to know what no operator tells."""

    @property
    def position(self) -> int:
        """How many events there are so far."""

    def use_on_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """``tensor.record_stream(stream)`` was called."""

    def wait_until(self, position: int) -> None:
        """The host waited until the GPU had done everything queued at ``position``."""

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache()`` was called."""

    def rebuild_buckets(self, sizes: list[int]) -> None:
        """DDP drops its buckets and makes new ones of these bytes."""


def fake_mode() -> FakeTensorMode:
    """Return the mode under which tensors have shapes and no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor is; of fake ones asked without a way through torch's dispatcher."""
    return tensor.fake_device if type(tensor) is FakeTensor else tensor.device


def join_fake_group(rank: int, world_size: int) -> None:
    """Become one rank of a process group whose collectives move nothing; once for all runs."""
    if dist.is_initialized():
        return
    store = FakeStore()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    old_collectives.install()


class _RunningWatcher:
    """Passes on to the watcher of the run that is under way: patches outlive a run."""

    def __init__(self) -> None:
        self.watcher: Watcher | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.watcher, name)


_running = _RunningWatcher()


def install(watcher: Watcher) -> None:
    """Patch torch for the rest of this process, and tell ``watcher`` alone from now on."""
    patched = _running.watcher is not None
    _running.watcher = watcher
    streams.install()
    if not patched:
        _patch(_running)


def _patch(watcher: Any) -> None:
    fake_keys.install()
    _mesh_is_real()
    _data_moves_device()
    _patch_fsdp2()
    _patch_fsdp1(watcher)
    _patch_ddp(watcher)
    _patch_optimizers()
    _replace(torch.cpu, "Event", _make_event(watcher))
    _complete_streams()
    _replace(torch.cuda, "empty_cache", lambda: watcher.empty_cache())  # noqa: PLW0108 (it changes)
    torch.cpu.Stream.synchronize = lambda _self: watcher.wait_until(  # type: ignore[attr-defined]
        watcher.position
    )
    no_references: Any = SimpleNamespace(getweakrefs=lambda _tensor: [])
    _replace(torch.utils, "weakref", no_references)


def _make_event(watcher: Watcher) -> type:
    """A ``torch.cpu.Event`` that knows when it was recorded and tells when the host waits."""

    class Event:
        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            self._position = 0

        def record(self, stream: Any = None) -> None:  # noqa: ARG002
            self._position = watcher.position

        def query(self) -> bool:
            return True

        def wait(self, stream: Any = None) -> None:
            pass

        def synchronize(self) -> None:
            watcher.wait_until(self._position)

    return Event


def _complete_streams() -> None:
    """Give the host's streams what torch 2.6 to 2.9 leave out, and events to all."""

    def record_event(_self: Any, event: Any = None) -> Any:
        event = torch.cpu.Event() if event is None else event
        event.record()
        return event

    stream: Any = torch.cpu.Stream
    stream.record_event = record_event
    if not hasattr(stream, "wait_event"):
        stream.wait_event = lambda *_args: None


def _replace(owner: Any, name: str, new: Any) -> None:
    """Replace an attribute that must exist, so that a moved one is noticed at once."""
    getattr(owner, name)
    setattr(owner, name, new)


def unfaked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs on real tensors, whatever mode is on."""

    def real(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return real


def _mesh_is_real() -> None:
    """A device mesh computes ranks with tensors: they need values."""
    for name in (
        "__init__",
        "__getitem__",
        "_flatten",
        "get_local_rank",
        "get_coordinate",
        "_get_all_submeshes",
    ):
        method = getattr(DeviceMesh, name, None)
        if method is not None:
            setattr(DeviceMesh, name, unfaked(method))
    whole = vars(DeviceMesh).get("mesh")  # an attribute before torch 2.10
    if isinstance(whole, property) and whole.fget is not None:
        DeviceMesh.mesh = property(unfaked(whole.fget))  # type: ignore[assignment]
    make = unfaked(device_mesh.init_device_mesh)
    for module in (device_mesh, dist, base):
        _replace(module, "init_device_mesh", make)


# -- FSDP2 ------------------------------------------------------------------------------------


class _Chunks:
    """What ``_chunk_with_empty`` returns, each chunk made when it is asked for.

    ``fully_shard`` cuts every parameter into world-size views to keep one.
    """

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._size = -(-tensor.size(dim) // count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        whole = self._tensor.size(self._dim)
        start = min(index * self._size, whole)
        length = max(0, min(self._size, whole - start))
        if length:
            return self._tensor.narrow(self._dim, start, length)
        shape = list(self._tensor.shape)
        shape[self._dim] = 0
        return self._tensor.new_empty(shape)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[index] for index in range(self._count))


def _patch_fsdp2() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fully_shard

    _replace(_fsdp_param, "_chunk_with_empty", _Chunks)
    mesh_info = unfaked(_fsdp_init._get_post_forward_mesh_info)
    for module in (_fsdp_init, _fully_shard):
        _replace(module, "_get_device_from_mesh", lambda _mesh: GPU)
        _replace(module, "_get_post_forward_mesh_info", mesh_info)


# -- FSDP1 ------------------------------------------------------------------------------------


def _data_moves_device() -> None:
    """``tensor.data = other`` takes over the other's device (FSDP1's offload relies on it)."""
    plain: Any = torch.Tensor.data

    def replace(self: Any, value: Any) -> None:
        plain.__set__(self, value)
        if isinstance(value, FakeTensor):
            self.fake_device = value.fake_device

    FakeTensor.data = property(plain.__get__, replace)  # type: ignore[assignment]


def _patch_fsdp1(watcher: Watcher) -> None:
    from torch.distributed.fsdp import _flat_param, _init_utils, _runtime_utils

    from fsdp_doctor.training.strategies import fsdp1

    def allocated(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().size() > 0

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)

    def use_on_stream(tensor: torch.Tensor, stream: Any) -> None:
        watcher.use_on_stream(tensor, stream)

    _replace(_flat_param, "_data_ptr_allocated", allocated)
    _replace(_flat_param, "_same_storage", same)
    _replace(_init_utils, "_get_compute_device", lambda *_args, **_kwargs: GPU)
    _replace(fsdp1, "_check_can_pin", lambda _device: None)
    for module in (_flat_param, _runtime_utils):
        _replace(module, "_no_dispatch_record_stream", use_on_stream)


# -- DDP --------------------------------------------------------------------------------------


class _Reducer:
    """DDP's reducer, whose buckets are rebuilt in the log only: it would read real data."""

    def __init__(self, ddp: Any, watcher: Watcher) -> None:
        self._reducer, self._ddp, self._watcher = ddp.reducer, ddp, watcher
        self._ready: dict[int, torch.Tensor] = {}
        self._rebuilt = ddp.find_unused_parameters and not ddp.static_graph
        for parameter in ddp.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _note(self, parameter: torch.Tensor) -> None:
        if not self._rebuilt and self._ddp.require_backward_grad_sync:
            self._ready.setdefault(id(parameter), parameter)

    def _rebuild_buckets(self) -> bool:
        """Regroup by the order in which gradients came (``Reducer::rebuild_buckets``)."""
        if self._rebuilt or not self._ready:
            return False
        self._rebuilt = True
        tensors = list(self._ready.values())
        limits = [c10d._DEFAULT_FIRST_BUCKET_BYTES, self._ddp.bucket_bytes_cap]
        with _disable_current_modes():
            groups, _ = c10d._compute_bucket_assignment_by_size(
                tensors, limits, [False] * len(tensors), list(range(len(tensors)))
            )
        self._watcher.rebuild_buckets([sum(tensors[i].nbytes for i in group) for group in groups])
        return False


def _patch_ddp(watcher: Watcher) -> None:
    from torch.nn.parallel import DistributedDataParallel, distributed

    original = DistributedDataParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.reducer = _Reducer(self, watcher)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    _replace(distributed, "_verify_param_shape_across_processes", lambda *_args, **_kwargs: None)


# -- optimizers -------------------------------------------------------------------------------


def _patch_optimizers() -> None:
    """Foreach is the default as on CUDA; a loss scaler finds no infinities."""
    from torch.nn.utils import clip_grad
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    optimizer._foreach_supported_types.append(FakeTensor)
    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    for module in (_foreach_utils, optimizer, clip_grad):
        if hasattr(module, "_get_foreach_kernels_supported_devices"):
            _replace(module, "_get_foreach_kernels_supported_devices", lambda: devices)

    def step(_self: Any, chosen: Any, _state: Any, *args: Any, **kwargs: Any) -> Any:
        return chosen.step(*args, **kwargs)

    _replace(torch.amp.GradScaler, "_maybe_opt_step", step)
