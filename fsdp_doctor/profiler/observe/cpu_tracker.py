"""The observer for CPU: a dispatch mode writes the event log as things happen.

Sizes are exact (the CPU allocator is not modelled: no rounding, no cache). Kernel-internal scratch
is invisible; everything that outlives the operator that made it is seen to the byte.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_doctor.memory.events import Allocation, EventLog, Label, stronger
from fsdp_doctor.memory.timeline import build_anatomy
from fsdp_doctor.model.memory import Anatomy, Category, MemoryCounters, Phase
from fsdp_doctor.profiler.observe.cpu_mode import StorageMode
from fsdp_doctor.profiler.observe.faults import Faults
from fsdp_doctor.profiler.observe.frames import FrameReader
from fsdp_doctor.profiler.observe.identity import IdentityScanner
from fsdp_doctor.profiler.observe.labels import plain_tensors
from fsdp_doctor.profiler.observe.modules import ModuleWatcher

_WEIGHTS = frozenset({Category.PARAMETERS, Category.UNSHARDED_PARAMETERS})
_AUTOCAST = Label(Category.UNSHARDED_PARAMETERS, "autocast_cast")


class CpuObserver:
    """Watches storages on ``device`` (a CPU). See ``Observer``."""

    source = "cpu_tracker"

    def __init__(self, device: torch.device) -> None:
        self.log = EventLog()
        self._faults = Faults()
        self._mode = StorageMode(self, torch.device(device.type))
        self._mode.faults = self._faults
        self._frames = FrameReader()
        self._identity = IdentityScanner(self._label, self._hint, self._faults)
        self._modules = ModuleWatcher(self.log, self._on_forward, self._faults)
        self._live: dict[int, Allocation | None] = {}
        self._casts: list[tuple[Allocation, Allocation]] = []
        self._labels: dict[int, Label] = {}
        self._hints: dict[int, Label] = {}
        self._phase: Phase | None = None
        self._autocast = False

    # -- Observer -----------------------------------------------------------------------------

    def start(self) -> None:
        """Enter the dispatch mode."""
        self._mode.install()

    def begin_phase(self, step: int, phase: Phase, microbatch: int) -> None:
        """Mark the log."""
        self._faults.raise_first()
        self._mode.flush()
        self._phase = phase
        self.log.begin_phase(step, phase, microbatch)

    def end_phase(self) -> tuple[MemoryCounters, MemoryCounters]:
        """Mark the log, and label what is held by model and optimizer now."""
        self._faults.raise_first()
        counters = self.seen()
        self._identity.scan(gradients_complete=self._phase is Phase.BACKWARD)
        self.log.end_phase()
        self._phase = None
        return counters

    def seen(self) -> tuple[MemoryCounters, MemoryCounters]:
        """Return what the log counts."""
        self._mode.flush()
        end, peak = self.log.current_bytes, self.log.peak_bytes
        return (
            MemoryCounters(allocated_bytes=end, requested_bytes=end),
            MemoryCounters(allocated_bytes=peak, requested_bytes=peak),
        )

    def watch(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Hook the modules and label what they hold."""
        self._modules.watch(model)
        self._identity.watch(model, optimizer, self._modules.names)
        self._identity.scan(gradients_complete=False)
        self.log.identified = True

    def inputs(self, batch: object) -> None:
        """Label the batch's tensors."""
        label = Label(Category.INPUTS)
        for tensor in plain_tensors(batch):
            self._label(tensor, label)

    def finish(self, step: int, measured_peak_bytes: dict[str, int] | None) -> Anatomy:  # noqa: ARG002
        """Leave the mode, remove the hooks, build the anatomy. The measured peaks are our own."""
        self._stop()
        self._faults.raise_first()
        return self._anatomy(step, None)

    def abort(self) -> Anatomy | None:
        """Leave the mode and describe the unfinished step, if one had begun."""
        self._stop()
        if not self.log.phases:
            return None
        last = self.log.phases[-1]
        reason = f"the step ended in phase {last.phase.value} with an exception"
        return self._anatomy(last.step, reason, unfinished=True)

    def _stop(self) -> None:
        try:
            self._mode.flush()
            self.log.end_phase()
            self._identity.scan(gradients_complete=False)
        finally:
            self._modules.remove()
            self._identity.remove()
            self._mode.uninstall()

    def _anatomy(self, step: int, incomplete: str | None, *, unfinished: bool = False) -> Anatomy:
        self.log.head_module = self._modules.head_module or self.log.head_module
        for cast, original in self._casts:
            held = original.label
            if cast.hint is None and held is not None and held.category in _WEIGHTS:
                cast.hint = _AUTOCAST
        return build_anatomy(
            self.log,
            step,
            source=self.source,
            expected_bytes=self._identity.expected_bytes,
            incomplete=incomplete,
            unfinished=unfinished,
        )

    def _on_forward(self, module: nn.Module) -> None:
        self._identity.hook_views(module)
        # asked here because inside an operator autocast is always off
        self._autocast = torch.is_autocast_enabled("cpu")

    # -- StorageSink --------------------------------------------------------------------------

    def born(self, key: int, size: int, operator: str | None, cast_of: int | None) -> None:
        """Log a storage's memory; an empty one has none yet."""
        if not size:
            self._live[key] = None
            return
        allocation = self.log.allocate(size, operator=operator, frames=self._frames.read())
        self._live[key] = allocation
        if cast_of is not None and self._autocast:
            original = self._live.get(cast_of)
            if original is not None:
                self._casts.append((allocation, original))

    def resized(self, key: int, size: int) -> None:
        """Log the new memory, then the old one's end; what the storage holds stays known."""
        old = self._live.get(key)
        if not size:
            if old is not None:
                self.log.free(old)
            self._live[key] = None
            return
        frames = self._frames.read()
        if old is None:
            new = self.log.allocate(size, operator="aten.resize_", frames=frames)
            new.label, new.hint = self._labels.get(key), self._hints.get(key)
        else:
            new = self.log.resize(old, size, operator="aten.resize_", frames=frames)
        self._live[key] = new

    def died(self, key: int) -> None:
        """Log the end of a storage's memory."""
        old = self._live.pop(key, None)
        self._labels.pop(key, None)
        self._hints.pop(key, None)
        if old is not None:
            self.log.free(old)

    def renamed(self, old: int, new: int) -> None:
        """The memory goes on under another key."""
        self._live[new] = self._live.pop(old, None)
        for table in (self._labels, self._hints):
            if old in table:
                table[new] = table.pop(old)

    # -- labels -------------------------------------------------------------------------------

    def _label(self, tensor: torch.Tensor, label: Label) -> int | None:
        """Write down what a storage holds; return its bytes, or None if it is not on the device."""
        key = self._mode.key_of(tensor)
        if key is None:
            return None
        allocation = self._live.get(key)
        if stronger(label, self._labels.get(key)):
            self._labels[key] = label
            if allocation is not None:
                allocation.label = label
        return 0 if allocation is None else allocation.size_bytes

    def _hint(self, tensor: torch.Tensor, label: Label) -> None:
        key = self._mode.key_of(tensor)
        if key is None:
            return
        self._hints[key] = label
        allocation = self._live.get(key)
        if allocation is not None:
            allocation.hint = label
