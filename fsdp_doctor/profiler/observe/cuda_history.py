"""The observer for CUDA: the allocator's own history, read once at the end.

While the job runs only marks are taken: where phases and module calls begin and end, and which
address holds which tensor. Each mark carries the allocator's count of operations, so it can be
placed exactly in the trace. Nothing here allocates on the device or synchronises it.

The allocator has one history, and turning it off ends everyone's. If somebody has turned it on
already, nothing is observed; a history that is turned on during the observation ends with it.

Private: ``torch._C._cuda_isHistoryEnabled`` (2.1 - 2.14),
``torch.cuda.memory._record_memory_history`` (``enabled, context, stacks, max_entries``: 2.1 -
2.14), ``torch.cuda.memory._snapshot`` (2.0 - 2.14).
"""
# ruff: noqa: SLF001

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_doctor.memory.cuda_trace import (
    Backward,
    Begin,
    End,
    Enter,
    Holds,
    Leave,
    Mark,
    Note,
    hint_autocast_casts,
    read_history,
    round_up,
)
from fsdp_doctor.memory.events import Label
from fsdp_doctor.memory.timeline import build_anatomy
from fsdp_doctor.model.memory import Anatomy, Category, MemoryCounters, Phase
from fsdp_doctor.profiler.observe.faults import Faults
from fsdp_doctor.profiler.observe.identity import IdentityScanner
from fsdp_doctor.profiler.observe.labels import plain_tensors
from fsdp_doctor.profiler.observe.modules import ModuleWatcher

MAX_ENTRIES = 4_000_000
"""Entries of the history ring; a step of a large model makes 10 - 30 thousand."""


class CudaHistoryObserver:
    """Watches the caching allocator of one CUDA device. See ``Observer``."""

    source = "cuda_history"

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._marks: list[Mark] = []
        self._now: tuple[int, int | None] = (0, None)
        self._origin: int | None = None
        self._recording = False
        self._faults = Faults()
        self._identity = IdentityScanner(self._label, self._hint, self._faults)
        self._modules = ModuleWatcher(self, self._identity.hook_views, self._faults)
        self._autocast_weights: dict[str, tuple[int, ...]] = {}
        self._phase: Phase | None = None
        self._last_step = -1

    # -- Observer -----------------------------------------------------------------------------

    def start(self) -> None:
        """Turn the allocator's history on, before anything lives on the device.

        Raises RuntimeError when it is on already.
        """
        torch.cuda.init()  # history needs the allocator to exist
        enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)  # absent from CPU builds
        if enabled is not None and enabled():
            raise RuntimeError("the allocator's history is on already and is not ours to end")
        torch.cuda.memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=MAX_ENTRIES
        )
        self._recording = True
        self._origin = self._operations()

    def begin_phase(self, step: int, phase: Phase, microbatch: int) -> None:
        """Take a mark."""
        self._faults.raise_first()
        self._phase, self._last_step = phase, step
        self._mark(Begin(step, phase, microbatch))

    def end_phase(self) -> tuple[MemoryCounters, MemoryCounters]:
        """Take a mark, and note at which addresses model and optimizer hold what."""
        self._faults.raise_first()
        self._scan(gradients_complete=self._phase is Phase.BACKWARD)
        self._mark(End(self._requested_peak()))
        self._phase = None
        return MemoryCounters(), MemoryCounters()

    def seen(self) -> tuple[MemoryCounters, MemoryCounters]:
        """Return nothing: the device counts."""
        return MemoryCounters(), MemoryCounters()

    def watch(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Hook the modules and note what they hold."""
        self._modules.watch(model)
        self._identity.watch(model, optimizer, self._modules.names)
        self._scan(gradients_complete=False)

    def inputs(self, batch: object) -> None:
        """Note the batch's addresses."""
        self._now = self._moment()
        for tensor in plain_tensors(batch):
            self._label(tensor, Label(Category.INPUTS))

    def finish(self, step: int, measured_peak_bytes: dict[str, int] | None) -> Anatomy:
        """Take the snapshot, turn the history off, remove the hooks, build the anatomy."""
        return self._anatomy(step, measured_peak_bytes, None)

    def abort(self) -> Anatomy | None:
        """Do as ``finish`` for the step that an exception ended; None if none had begun."""
        if not any(isinstance(mark.note, Begin) for mark in self._marks):
            self._stop()
            return None
        place = "outside of phases" if self._phase is None else f"phase {self._phase.value}"
        reason = f"an exception ended the step ({place})"
        return self._anatomy(self._last_step, None, reason)

    def _anatomy(self, step: int, measured: dict[str, int] | None, reason: str | None) -> Anatomy:
        try:
            self._scan(gradients_complete=False)
            head = self._modules.head_module
            at_end = self._operations()
        finally:
            snapshot = self._stop()
        self._faults.raise_first()
        expected = None
        if at_end is not None and self._origin is not None:
            expected = at_end - self._origin
        history = read_history(
            snapshot,
            self._device.index,
            self._marks,
            operations_at_end=at_end,
            expected_operations=expected,
        )
        self._marks = []
        log = history.log
        log.head_module = head
        hint_autocast_casts(log, self._autocast_weights)
        notes = ([] if reason is None else [reason]) + _of_step(history.incomplete, step)
        if history.failed_bytes is not None:
            notes.append(f"a request of {history.failed_bytes} bytes failed")
        return build_anatomy(
            log,
            step,
            source=self.source,
            measured_peak_bytes=measured,
            expected_bytes=self._identity.expected_bytes,
            incomplete="; ".join(notes) or None,
            unfinished=reason is not None,
        )

    def _stop(self) -> dict[str, Any]:
        """Remove the hooks and turn the history off; return the last snapshot."""
        self._modules.remove()
        self._identity.remove()
        if not self._recording:
            return {}
        self._recording = False
        try:
            snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        return snapshot

    # -- ModuleSink ---------------------------------------------------------------------------

    def enter_module(self, module: str) -> None:
        """Take a mark."""
        self._mark(Enter(module))

    def leave_module(self, module: str) -> None:
        """Take a mark; at the end of a forward under autocast note what it may have cast."""
        self._mark(Leave(module))
        if module == "" and self._phase is Phase.FORWARD and torch.is_autocast_enabled("cuda"):
            self._autocast_weights = self._autocast_weights or self._identity.float_weights()

    def enter_backward(self, module: str) -> None:
        """Take a mark."""
        self._mark(Backward(module))

    # -- marks --------------------------------------------------------------------------------

    def _operations(self) -> int | None:
        """Allocations + frees that the device has counted, or None before it is in use."""
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
        counts = stats.get("allocation", {}).get("all")
        return counts["allocated"] + counts["freed"] if counts else 0

    def _requested_peak(self) -> int | None:
        """The device's peak of requested bytes since the recorder reset the peaks."""
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
        found = stats.get("requested_bytes", {}).get("all")
        return found["peak"] if found else None

    def _moment(self) -> tuple[int, int | None]:
        return time.time_ns() // 1000, self._operations()

    def _mark(self, note: Note) -> None:
        time_us, operations = self._moment()
        self._marks.append(Mark(time_us, note, operations))

    def _scan(self, *, gradients_complete: bool) -> None:
        self._now = self._moment()
        self._identity.scan(gradients_complete=gradients_complete)

    def _block(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(address, bytes) of a tensor's storage, or None if it is not on the device."""
        storage = tensor.untyped_storage()
        if storage.device != self._device:
            return None
        return storage.data_ptr(), storage.nbytes()

    def _label(self, tensor: torch.Tensor, label: Label) -> int | None:
        """Note the address; return the bytes the allocator counts, or None if it is elsewhere."""
        block = self._block(tensor)
        if block is None or not all(block):
            return None if block is None else 0
        self._marks.append(Mark(self._now[0], Holds(block[0], label), self._now[1]))
        return round_up(block[1])

    def _hint(self, tensor: torch.Tensor, label: Label) -> None:
        block = self._block(tensor)
        if block is not None and all(block):
            self._mark(Holds(block[0], label, certain=False))


def _of_step(notes: list[str], step: int) -> list[str]:
    """What concerns this step: notes on other steps' peaks are left out."""
    return [note for note in notes if not note.startswith("step ") or f"step {step} " in note]
