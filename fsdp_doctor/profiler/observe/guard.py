"""Watching must not hurt the watched: an observer's error ends the observation, not the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from fsdp_doctor.model.memory import Anatomy, MemoryCounters, Phase
from fsdp_doctor.profiler.observe.protocol import Observer

Result = TypeVar("Result")
_NOTHING = (MemoryCounters(), MemoryCounters())


class GuardedObserver:
    """Passes on to an observer until it raises; then stops it for good and warns.

    ``warn`` is called with the error's text. Without an observer every call does nothing.
    """

    def __init__(self, observer: Observer | None, warn: Callable[[str], None]) -> None:
        self._observer, self._warn = observer, warn

    @property
    def active(self) -> bool:
        """Whether allocations are being watched."""
        return self._observer is not None

    def start(self) -> None:
        """See ``Observer``."""
        self._ask(lambda observer: observer.start(), None)

    def watch(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """See ``Observer``."""
        self._ask(lambda observer: observer.watch(model, optimizer), None)

    def inputs(self, batch: object) -> None:
        """See ``Observer``."""
        self._ask(lambda observer: observer.inputs(batch), None)

    def begin_phase(self, step: int, phase: Phase, microbatch: int) -> None:
        """See ``Observer``."""
        self._ask(lambda observer: observer.begin_phase(step, phase, microbatch), None)

    def end_phase(self) -> tuple[MemoryCounters, MemoryCounters]:
        """See ``Observer``; nothing known without one."""
        return self._ask(lambda observer: observer.end_phase(), _NOTHING)

    def seen(self) -> tuple[MemoryCounters, MemoryCounters]:
        """See ``Observer``; nothing known without one."""
        return self._ask(lambda observer: observer.seen(), _NOTHING)

    def finish(self, step: int, measured_peak_bytes: dict[str, int] | None) -> Anatomy | None:
        """End the observation with the anatomy of ``step``; None when there is none."""
        anatomy = self._ask(lambda observer: observer.finish(step, measured_peak_bytes), None)
        self._observer = None
        return anatomy

    def abort(self) -> Anatomy | None:
        """End the observation in mid-step, or before a first step."""
        anatomy = self._ask(lambda observer: observer.abort(), None)
        self._observer = None
        return anatomy

    def _ask(self, call: Callable[[Observer], Result], otherwise: Result) -> Result:
        if self._observer is None:
            return otherwise
        try:
            return call(self._observer)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is told and not raised)
            self._end_for(error)
            return otherwise

    def _end_for(self, error: Exception) -> None:
        observer, self._observer = self._observer, None
        self._warn(f"allocations are no longer observed: {type(error).__name__}: {error}")
        try:
            if observer is not None:
                observer.abort()
        except Exception as again:  # noqa: BLE001 (told; the observer removes its hooks first)
            if str(again) != str(error):
                self._warn(f"the observer did not end well: {type(again).__name__}: {again}")
