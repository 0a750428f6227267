"""The CUDA observer without a GPU: training on gloo ranks, its storages played to it as blocks.

A dispatch mode sees the storages; each becomes a block of an allocator that is played here, with a
trace, a clock and counters as ``torch.cuda.memory`` has them. What the observer makes of that must
be what the CPU observer makes of the same step, up to the rounding to 512 bytes.
"""
# ruff: noqa: D102, D103 - the names say it

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_tracker_model import CASES, Case, on_ranks, train  # noqa: E402

from fsdp_doctor.memory.cuda_trace import round_up  # noqa: E402
from fsdp_doctor.model.memory import Anatomy  # noqa: E402
from fsdp_doctor.profiler.observe import make_observer  # noqa: E402
from fsdp_doctor.profiler.observe.cpu_mode import StorageMode  # noqa: E402
from fsdp_doctor.profiler.observe.cuda_history import CudaHistoryObserver  # noqa: E402
from fsdp_doctor.profiler.observe.frames import FrameReader  # noqa: E402

CPU = torch.device("cpu")


class PlayedAllocator:
    """Blocks for storages; a freed address is used again, as the real allocator does."""

    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self.blocks: dict[int, tuple[int, int]] = {}
        """Storage key -> (address, bytes)."""
        self._free: dict[int, list[int]] = {}
        self._next = 1 << 30
        self.operations = self.requested = self.peak = 0
        self._frames = FrameReader()

    def born(self, key: int, size: int, operator: str | None, cast_of: int | None) -> None:
        if not size:
            return
        reusable = self._free.get(round_up(size))
        address = reusable.pop() if reusable else self._next
        self._next += 0 if address != self._next else round_up(size)
        self.blocks[key] = (address, size)
        self.operations += 1
        self.requested += size
        self.peak = max(self.peak, self.requested)
        frames = []
        for text in self._frames.read():
            place, _, name = text.rpartition(" ")
            path, _, line = place.rpartition(":")
            frames.append({"filename": path, "line": int(line), "name": name})
        self._note("alloc", address, size, frames)

    def resized(self, key: int, size: int) -> None:
        self.died(key)
        self.born(key, size, None, None)

    def died(self, key: int) -> None:
        block = self.blocks.pop(key, None)
        if block is None:
            return
        self.operations += 1
        self.requested -= block[1]
        self._free.setdefault(round_up(block[1]), []).append(block[0])
        self._note("free_requested", *block, [])
        self._note("free_completed", *block, [])

    def renamed(self, old: int, new: int) -> None:
        if old in self.blocks:
            self.blocks[new] = self.blocks.pop(old)

    def _note(self, action: str, address: int, size: int, frames: list[Any]) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
        self.trace.append(entry | {"time_us": time.time_ns() // 1000})

    def stats(self, device: Any) -> dict[str, Any]:
        counted = {"allocated": self.operations, "freed": 0}
        return {"allocation": {"all": counted}, "requested_bytes": {"all": {"peak": self.peak}}}

    def snapshot(self) -> dict[str, Any]:
        return {"device_traces": [self.trace], "segments": []}


class PlayedObserver(CudaHistoryObserver):
    """Asks the played allocator for addresses, and resets its peaks as a recorder does."""

    allocator: PlayedAllocator
    mode: StorageMode

    def _block(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        key = self.mode.key_of(tensor)
        return None if key is None else self.allocator.blocks.get(key, (0, 0))

    def end_phase(self) -> Any:
        self.mode.flush()
        counters = super().end_phase()
        self.allocator.peak = self.allocator.requested
        return counters


def observe_as_cuda(case: Case) -> Anatomy:
    """Runs in a forked rank: what it replaces in ``torch.cuda`` stays there."""
    allocator = PlayedAllocator()
    torch.cuda.init = lambda: None
    torch.cuda.memory._record_memory_history = lambda *_args, **_kwargs: None
    torch.cuda.memory._snapshot = allocator.snapshot
    torch.cuda.memory.memory_stats_as_nested_dict = allocator.stats
    enabled = torch.is_autocast_enabled
    torch.is_autocast_enabled = lambda _device=None: enabled("cpu")
    observer = PlayedObserver(torch.device("cuda", 0))
    observer.allocator, observer.mode = allocator, StorageMode(allocator, CPU)
    observer.mode.install()
    observer.start()
    keep = train(case, observer, CPU)
    anatomy = observer.finish(2, None)
    observer.mode.uninstall()
    torch.is_autocast_enabled = enabled
    del keep
    return anatomy


def observe_as_cpu(case: Case) -> Anatomy:
    observer = make_observer(CPU)
    observer.start()
    keep = train(case, observer, CPU)
    anatomy = observer.finish(2, None)
    del keep
    return anatomy


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("", "autocast", "checkpointing")], ids=str
)
def test_both_observers_agree(case: Case, tmp_path: Path) -> None:
    for cuda, cpu in on_ranks(lambda _: (observe_as_cuda(case), observe_as_cpu(case)), tmp_path):
        assert cuda.incomplete is None
        optimizer = cuda.phases["optimizer"].categories
        for name in ("parameters", "gradients", "optimizer_state"):
            assert optimizer[name] == cuda.expected_bytes[name]
            rounding = cuda.expected_bytes[name] - cpu.expected_bytes[name]
            assert 0 <= rounding < 512 * 200
        assert cuda.peak_phase is cpu.peak_phase
        for phase in ("backward", "optimizer"):
            ours, theirs = cuda.phases[phase], cpu.phases[phase]
            assert sum(ours.categories.values()) == ours.peak_allocated_bytes
            assert ours.categories.get("unknown", 0) == 0
            # gloo's thread lets go of a communication buffer when it likes
            slack = 0.02 * theirs.peak_allocated_bytes + 2 * 263_168
            assert abs(ours.peak_allocated_bytes - theirs.peak_allocated_bytes) < slack
        for name in ("activations", "unsharded_parameters"):
            if case.strategy == "ddp" and name in cpu.categories:
                assert cuda.categories[name] == pytest.approx(cpu.categories[name], rel=0.02)
        owners = {top.module for top in cuda.top_allocations}
        assert any(name is not None and name.startswith("blocks.") for name in owners)
