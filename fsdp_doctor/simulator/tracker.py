"""The profiler's CPU observer on fake tensors: sees only what would lie on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from fsdp_doctor.memory.events import Allocation, Label
from fsdp_doctor.memory.mechanisms import by_frames
from fsdp_doctor.memory.replay import StreamNotes
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.profiler.observe.cpu_mode import StorageMode
from fsdp_doctor.profiler.observe.cpu_tracker import CpuObserver
from fsdp_doctor.profiler.observe.frames import FrameReader
from fsdp_doctor.profiler.observe.labels import plain_tensors
from fsdp_doctor.simulator.compat import GPU, device_of
from fsdp_doctor.simulator.kernels import MATMULS, ON_GPU, OUTPUT_ORDER, copy_scratch, scratch
from fsdp_doctor.simulator.streams import current_stream, in_backward, stream_number
from fsdp_doctor.simulator.work import WorkCounter

_aten: Any = torch.ops.aten
_ADD = _aten.add.Tensor
_CAST = _aten._to_copy.default  # noqa: SLF001
_DEVICE = torch.ops.prim.device.default
_ITEM = _aten._local_scalar_dense.default  # noqa: SLF001
_PIN = _aten._pin_memory.default  # noqa: SLF001
_PINNED = _aten.is_pinned.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001

_OWN = "fsdp_doctor/simulator/"
_STARTS_STEPS = " dry_run"
"""The function whose callers have no part in the training step."""
DDP_BUCKET = Label(Category.COMMUNICATION, "ddp_bucket")


class TrainingFrames(FrameReader):
    """Frames of the training step alone: not of the simulator, and not of what started it."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}

    def read(self) -> tuple[str, ...]:
        """The Python frames that asked for memory, innermost first."""
        frames = super().read()
        known = self._known.get(frames)
        if known is None:
            known = self._known[frames] = tuple(self._inner(frames))
        return known

    @staticmethod
    def _inner(frames: tuple[str, ...]) -> Iterator[str]:
        for frame in frames:
            if _STARTS_STEPS in frame:
                return
            if _OWN not in frame:
                yield frame


class FakeStorageMode(StorageMode):
    """Watches storages of fake tensors on the simulated GPU; answers what needs real data."""

    def __init__(self, observer: FakeObserver) -> None:
        super().__init__(observer, torch.device("meta"))
        self._observer = observer

    def key_of(self, tensor: torch.Tensor) -> int | None:
        """The key of a tensor's storage, or None when it is not on the GPU.

        A fake tensor's storage calls itself meta wherever the tensor is.
        """
        return super().key_of(tensor) if device_of(tensor) == GPU else None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled: no need to keep ``torch.compile`` out of every call."""
        return False

    def _output(self, tensor: torch.Tensor, operator: Any, node: int, cast_of: int | None) -> None:
        if device_of(tensor) == GPU:
            super()._output(tensor, operator, node, cast_of)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator on shapes, then look at the storages of its outputs."""
        if func is _DEVICE:  # every other call: fake mode would say the same, and takes long
            return device_of(args[0])
        if DTensor in types:
            return NotImplemented
        if func in _ANSWERED:
            return _ANSWERED[func](args)
        if func is _PIN:
            func, kwargs = _aten.clone.default, {}
        result = func(*args, **(kwargs or {}))
        if not self._suppressed:
            self._observer.work.operator(func, args, kwargs or {}, result)
        if result is None and not self._suppressed:
            with self._observer.inside(func, copy_scratch(func, args, kwargs or {})):
                return None
        if self._suppressed or isinstance(result, (int, float, bool)):
            return result
        steps = scratch(func, args)
        if steps and not _on_gpu(args):
            steps = []
        if not steps and func not in MATMULS:
            with self._turn:
                self._look(func, args, result)
        else:
            with self._observer.inside(func, steps), self._turn:
                self._look(func, args, result)
        return result

    def _look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        node = self._node()
        if func is _ADD and node and self._accumulated(args, result, node):
            return
        source = None
        if func is _CAST:
            source = self._keys.get(id(args[0].untyped_storage()))
        seen = result[: ON_GPU[func]] if func in ON_GPU else result
        if func in OUTPUT_ORDER:
            seen = [result[place] for place in OUTPUT_ORDER[func]]
        for tensor in (seen,) if type(seen) is FakeTensor else plain_tensors(seen):
            self._output(tensor, func, node, source)

    @staticmethod
    def _node() -> int:
        return in_backward()


def _some_value(dtype: torch.dtype) -> bool | int | float:
    """What ``.item()`` answers without data: true, or one."""
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _on_gpu(args: Any) -> bool:
    return any(isinstance(value, torch.Tensor) and device_of(value) == GPU for value in args)


_ANSWERED: dict[Any, Callable[[Any], Any]] = {
    _WAIT: lambda args: args[0],
    _ITEM: lambda args: _some_value(args[0].dtype),
    _PINNED: lambda _args: True,
}
"""Operators that fake tensors cannot run."""


class FakeObserver(CpuObserver):
    """Logs what the GPU would hold, with the stream of every block.

    ``workspace_bytes``: the cuBLAS workspace of each thread that multiplies (forward runs in
    Python's thread, backward in autograd's).
    """

    source = "fake"

    def __init__(self, workspace_bytes: int) -> None:
        super().__init__(torch.device("cpu"))
        self._mode: FakeStorageMode = FakeStorageMode(self)
        self._frames = TrainingFrames()
        self._workspace_bytes = workspace_bytes
        self._workspaces: set[tuple[bool, int]] = set()
        self.streams = StreamNotes()
        self.work = WorkCounter()

    def begin_phase(self, step: int, phase: Phase, microbatch: int = 0) -> None:
        """Mark where a phase begins."""
        super().begin_phase(step, phase, microbatch)
        self.work.begin(step, phase.value)

    def born(self, key: int, size: int, operator: str | None, cast_of: int | None) -> None:
        """Log a storage's memory on the current stream."""
        super().born(key, size, operator, cast_of)
        if size:
            self.log.allocations[-1].stream = current_stream()

    def resized(self, key: int, size: int) -> None:
        """Log the new memory on the current stream."""
        super().resized(key, size)
        if size:
            self.log.allocations[-1].stream = current_stream()

    def use_on_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Take note of ``tensor.record_stream(stream)``."""
        for inner in plain_tensors(tensor):
            key = self._mode.key_of(inner)
            allocation = None if key is None else self._live.get(key)
            if allocation is not None:
                self.streams.uses.setdefault(allocation.id, set()).add(stream_number(stream))

    @property
    def position(self) -> int:
        """How many events there are so far."""
        return self.log.position

    def wait_until(self, position: int) -> None:
        """The host waited until the GPU had done everything queued at ``position``."""
        self.streams.waits.append((self.log.position, position))

    def empty_cache(self) -> None:
        """Take note of ``torch.cuda.empty_cache()``."""
        self.streams.releases.append(self.log.position)

    @contextmanager
    def inside(self, operator: Any, steps: Sequence[int]) -> Iterator[None]:
        """Log what the operator's CUDA kernel allocates beside its outputs, which come within."""
        made: list[Allocation] = []
        before = steps.index(0) if 0 in steps else 0
        self._work_through(steps[:before], operator, made)
        yield
        if operator in MATMULS:
            self._multiply()
        self._work_through(steps[before:], operator, made)
        for block in made:
            if block.died is None:
                self.log.free(block)

    def _work_through(self, steps: Sequence[int], operator: Any, made: list[Allocation]) -> None:
        for step in steps:
            if step > 0:
                made.append(self._scratch(step, str(operator)))
            elif step < 0:
                self.log.free(made[-step - 1])

    def _multiply(self) -> None:
        place = (bool(in_backward()), current_stream())
        if self._workspace_bytes and place not in self._workspaces:
            self._workspaces.add(place)
            self._scratch(self._workspace_bytes, "cublas_workspace")

    def _scratch(self, size: int, operator: str) -> Allocation:
        self._mode.flush()
        allocation = self.log.allocate(size, operator=operator)
        allocation.stream = current_stream()
        return allocation

    def rebuild_buckets(self, sizes: list[int]) -> None:
        """DDP drops its buckets and makes new ones of these sizes."""
        as_views = False
        self.work.buckets = sizes
        for key, allocation in list(self._live.items()):
            if allocation is not None and by_frames(allocation.frames) == DDP_BUCKET:
                as_views |= allocation.label is not None
                self.log.free(allocation)
                self._live[key] = None
        for size in sizes:
            bucket = self._scratch(size, "aten.empty.memory_format")
            bucket.hint = Label(Category.GRADIENTS) if as_views else DDP_BUCKET

    def stop(self) -> None:
        """Leave the mode and remove the hooks; the log stays."""
        self._stop()
