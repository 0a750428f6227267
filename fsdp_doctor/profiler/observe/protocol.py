"""What an observer is."""

from __future__ import annotations

from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from fsdp_doctor.model.memory import Anatomy, MemoryCounters, Phase


class Observer(Protocol):
    """Watches every allocation of this process from ``start`` to ``finish``.

    Calls come from one thread. Steps count from 0; set-up is step -1.
    """

    def start(self) -> None:
        """Begin; call before the model is built."""

    def begin_phase(self, step: int, phase: Phase, microbatch: int) -> None:
        """A phase begins."""

    def end_phase(self) -> tuple[MemoryCounters, MemoryCounters]:
        """End the phase; return its (end, peak) as counted here.

        All fields are None where the device's own counters are the truth (CUDA).
        """

    def seen(self) -> tuple[MemoryCounters, MemoryCounters]:
        """Return (now, peak of the running phase) as ``end_phase`` would, without ending it."""

    def watch(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Take note of model and optimizer: as soon as they exist, and again after wrapping."""

    def inputs(self, batch: object) -> None:
        """Take note of a batch: its tensors are inputs."""

    def finish(self, step: int, measured_peak_bytes: dict[str, int] | None) -> Anatomy:
        """Stop, remove every hook, and return the anatomy of the completed ``step``.

        ``measured_peak_bytes``: phase -> the device's own peak of allocated bytes.
        """

    def abort(self) -> Anatomy | None:
        """Stop after an exception in mid-step: what was alive at the last peak, or None.

        Every hook is removed even if this raises.
        """
