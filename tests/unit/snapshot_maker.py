"""A small caching allocator that writes memory snapshots, for the tests of their readers."""

from __future__ import annotations

import gzip
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MiB = 1 << 20
BASE = 0x7F00_0000_0000
LINEAR = "torch/nn/modules/linear.py:134 forward|torch/nn/modules/module.py:1790 _call_impl"
STACKS = {
    "build": "torch/nn/modules/linear.py:109 __init__|train.py:10 build",
    "forward": f"{LINEAR}|model.py:20 forward|train.py:40 step",
    "loss": "torch/nn/functional.py:3500 cross_entropy|train.py:41 step",
    "grads": "torch/autograd/__init__.py:231 _make_grads|train.py:42 step",
    "backward": "",
    "state": "torch/optim/adam.py:180 _init_group|torch/optim/adam.py:230 step|train.py:43 step",
    "foreach": "torch/optim/adam.py:600 _multi_tensor_adam|torch/optim/adam.py:240 step",
    "gather": "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:59 foreach_all_gather",
    "keep": f"{LINEAR}|metrics.py:7 remember|train.py:45 step",
}


@dataclass
class Segment:
    """Reserved addresses, and the blocks in them: address -> (bytes, requested, frames)."""

    address: int
    size: int
    stream: int
    pool: tuple[int, int]
    large: bool
    blocks: dict[int, tuple[int, int, list[dict[str, Any]]]] = field(default_factory=dict)

    def hole(self, size: int) -> int | None:
        """The first address where ``size`` bytes are free."""
        at = self.address
        for start in sorted(self.blocks):
            if start - at >= size:
                return at
            at = start + self.blocks[start][0]
        return at if self.address + self.size - at >= size else None


@dataclass
class Maker:
    """Records what a job does with memory; times are microseconds, one per event."""

    segments: list[Segment] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    clock: int = 1_700_000_000_000_000
    next_address: int = BASE
    frames: dict[str, dict[str, Any]] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)

    def stack(self, name: str) -> list[dict[str, Any]]:
        """The frames of a named stack; frames are shared, as torch shares them."""
        return [self.frame(text) for text in STACKS.get(name, name).split("|") if text]

    def frame(self, text: str) -> dict[str, Any]:
        """One frame from ``file:line function``."""
        place, _, function = text.rpartition(" ")
        file, _, line = place.rpartition(":")
        made = {"name": function, "filename": file, "line": int(line)}
        return self.frames.setdefault(text, made)

    def event(self, action: str, address: int, size: int, **more: Any) -> None:
        """Append a trace entry."""
        self.clock += 1
        key = "device_free" if action == "oom" else "addr"
        entry = {"action": action, key: address, "size": size, "stream": 0, "time_us": self.clock}
        self.trace.append({**entry, "compile_context": "N/A", "user_metadata": "", **more})

    def note(self, name: str, *, start: bool = True) -> None:
        """Begin or end a ``record_function`` range."""
        self.clock += 1
        stage = "START" if start else "END"
        self.notes.append({"name": name, "stage": stage, "device": 0, "time_us": self.clock})

    def alloc(
        self, size: int, stack: str = "forward", *, stream: int = 0, pool: tuple[int, int] = (0, 0)
    ) -> int:
        """Allocate as the caching allocator does: first hole of the right kind, or a segment."""
        rounded = max(512, -(-size // 512) * 512)
        large = rounded > MiB
        frames = self.stack(stack)
        kind = (stream, pool, large)
        for segment in self.segments:
            if (segment.stream, segment.pool, segment.large) == kind:
                address = segment.hole(rounded)
                if address is not None:
                    break
        else:
            whole = -(-rounded // (2 * MiB)) * 2 * MiB
            whole = max(whole, 20 * MiB) if large and rounded < 10 * MiB else whole
            segment = Segment(self.next_address, whole, stream, pool, large)
            self.next_address += whole + 4 * MiB
            self.segments.append(segment)
            address = segment.address
            self.event("segment_alloc", address, whole, stream=stream, frames=frames)
        segment.blocks[address] = (rounded, size, frames)
        self.event("alloc", address, size, stream=stream, pool_id=pool, frames=frames)
        return address

    def free(self, *addresses: int, complete: bool = True) -> None:
        """Free blocks; without ``complete`` another stream still uses them."""
        for address in addresses:
            owner = next(s for s in self.segments if address in s.blocks)
            size = owner.blocks[address][1]
            self.event("free_requested", address, size, stream=owner.stream)
            self.waiting.add(address)
            if complete:
                self.waiting.discard(address)
                self.event("free_completed", address, size, stream=owner.stream)
                del owner.blocks[address]

    def oom(self, size: int, device_free: int = 0, stack: str = "forward") -> None:
        """A request that is refused."""
        self.event("oom", device_free, size, frames=self.stack(stack))

    def snapshot(self) -> dict[str, Any]:
        """The snapshot as torch 2.11 writes it, with two visible devices."""
        return {
            "segments": [self._segment(segment) for segment in self.segments],
            "device_traces": [list(self.trace), []],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
            "external_annotations": list(self.notes),
        }

    def _segment(self, segment: Segment) -> dict[str, Any]:
        blocks, at = [], segment.address
        for start in [*sorted(segment.blocks), segment.address + segment.size]:
            if start > at:
                blocks.append(_block(at, start - at, 0, "inactive", []))
            if start in segment.blocks:
                size, requested, frames = segment.blocks[start]
                state = "active_pending_free" if start in self.waiting else "active_allocated"
                blocks.append(_block(start, size, requested, state, frames))
                at = start + size
        active = sum(block[0] for block in segment.blocks.values())
        return {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size,
            "allocated_size": active,
            "active_size": active,
            "requested_size": sum(block[1] for block in segment.blocks.values()),
            "stream": segment.stream,
            "segment_type": "large" if segment.large else "small",
            "segment_pool_id": segment.pool,
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }


def _block(
    address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "address": address,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }


def training(
    steps: int = 3, *, layers: int = 2, activation: int = 8 * MiB, leak: int = 0, oom: bool = False
) -> Maker:
    """A job of ``layers`` layers under DDP's annotations; ``leak`` bytes are kept per step."""
    maker = Maker()
    for _ in range(layers):
        maker.alloc(4 * MiB, "build")
    state: list[int] = []
    for step in range(steps):
        maker.note("DistributedDataParallel.forward")
        kept = [maker.alloc(activation, "forward") for _ in range(layers)]
        maker.note("DistributedDataParallel.forward", start=False)
        if leak:
            maker.alloc(leak, "keep")
        if oom and step == steps - 1:
            maker.oom(64 * MiB, device_free=MiB)
            break
        loss = maker.alloc(2 * MiB, "loss")
        one = maker.alloc(512, "grads")
        grads = []
        for block in reversed(kept):
            grads.append(maker.alloc(4 * MiB, "backward"))
            maker.free(block)
        maker.free(one, loss)
        maker.note("Optimizer.step#AdamW.step")
        if not state:
            state = [maker.alloc(4 * MiB, "state") for _ in range(2 * layers)]
        maker.free(maker.alloc(4 * MiB, "foreach"))
        maker.note("Optimizer.step#AdamW.step", start=False)
        maker.free(*grads)
    return maker


def write(snapshot: object, path: Path) -> Path:
    """Write a snapshot, gzip where the name says so."""
    data = pickle.dumps(snapshot, protocol=4)
    path.write_bytes(gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)
    return path
