"""Time phases without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fsdp_doctor.model.memory import Phase


class Clock(Protocol):
    """Marks moments now, tells the time between two of them later."""

    def mark(self) -> Any:
        """Return a mark for this moment of the device's stream."""

    def done(self, mark: Any) -> bool:
        """Return whether the device has passed ``mark``."""

    def between_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks that are done, and free them for reuse."""

    def wait(self) -> None:
        """Wait until every mark is done (end of a run only)."""


class HostClock:
    """Host time; nothing is asynchronous on a CPU."""

    def mark(self) -> float:
        """Return the host's monotonic time (s)."""
        return time.perf_counter()

    def done(self, mark: float) -> bool:  # noqa: ARG002 (one protocol)
        """Return True."""
        return True

    def between_s(self, start: float, end: float) -> float:
        """Return ``end - start``."""
        return end - start

    def wait(self) -> None:
        """Do nothing."""


class CudaClock:
    """CUDA events on the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """Record an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def done(self, mark: torch.cuda.Event) -> bool:
        """Query the event."""
        return bool(mark.query())

    def between_s(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the elapsed device time."""
        return float(start.elapsed_time(end)) / 1e3

    def wait(self) -> None:
        """Synchronise the device."""
        torch.cuda.synchronize(self._device)


@dataclass(slots=True)
class StepTimes:
    """Marks of one step, read when the device has passed them."""

    step: int
    start: Any
    end: Any = None
    phases: list[tuple[Phase, int, Any, Any]] = field(default_factory=list)
    gaps: bool = False
    """Whether work outside of phases counts as a phase, ``unknown``."""
    loss: torch.Tensor | float | None = None
    """The loss, or a pinned scalar that holds it once the step is done."""


class TimeKeeper:
    """A queue of steps whose times are not known yet."""

    def __init__(self, device: torch.device) -> None:
        self.clock: Clock = CudaClock(device) if device.type == "cuda" else HostClock()
        self._pending: deque[StepTimes] = deque()

    def add(self, times: StepTimes) -> None:
        """Queue a step that has ended."""
        self._pending.append(times)

    def rest(self) -> list[dict[str, Any]]:
        """Return the records of all steps the device has passed, without waiting for others.

        For a job that failed: the device may never come to the end of its work.
        """
        records = []
        while self._pending and self.clock.done(self._pending[0].end):
            records.append(self._resolve(self._pending.popleft()))
        return records

    def ready(self, *, wait: bool = False) -> list[dict[str, Any]]:
        """Return the ``times`` records of steps the device has passed, oldest first.

        The step just queued is left for the next call, unless ``wait``.
        """
        if wait:
            self.clock.wait()
        records = []
        while len(self._pending) > (0 if wait else 1) and self.clock.done(self._pending[0].end):
            records.append(self._resolve(self._pending.popleft()))
        return records

    def _resolve(self, times: StepTimes) -> dict[str, Any]:
        whole = self.clock.between_s(times.start, times.end)
        phases = [
            (phase, micro, self.clock.between_s(start, end))
            for phase, micro, start, end in times.phases
        ]
        if times.gaps:
            named = sum(seconds for _, _, seconds in phases)
            phases.append((Phase.UNKNOWN, 0, max(0.0, whole - named)))
        record: dict[str, Any] = {
            "step": times.step,
            "step_time_s": whole,
            "phases": phases,
        }
        if times.loss is not None:
            loss = float(times.loss)
            finite = loss == loss and abs(loss) != float("inf")  # noqa: PLR0124 (NaN test)
            record.update(loss=loss if finite else None, loss_finite=finite)
        return record
