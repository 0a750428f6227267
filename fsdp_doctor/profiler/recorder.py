"""Writes what one rank's training loop costs, step by step.

Memory counters are written when they are read; times one step late, from CUDA events, so that no
synchronisation is added. A killed process loses at most the running step's memory and two steps'
times.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from fsdp_doctor.model.memory import MemoryCounters, Phase
from fsdp_doctor.model.run import Failure
from fsdp_doctor.profiler.clock import StepTimes, TimeKeeper
from fsdp_doctor.profiler.counters import host_rss_bytes, make_counters
from fsdp_doctor.profiler.failures import describe_failure
from fsdp_doctor.profiler.observe import Observer
from fsdp_doctor.runs.heartbeat import HeartbeatWriter
from fsdp_doctor.runs.writer import RankWriter

StepKind = Literal["observed", "warmup", "timed", "kernel_profile"]

OBSERVED_STEPS = 3
"""Step 0 creates optimizer state, step 1 rebuilds DDP's buckets, step 2 is steady."""

_DEVICE_USED_EVERY = 10
"""Steps between two reads of the whole device's used memory (it costs a driver call)."""


class Recorder:
    """Writes one rank's records. Make one with ``record``; methods are for one thread."""

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        device: torch.device,
        observer: Observer | None,
        keep_loss: bool = True,
    ) -> None:
        self.directory, self.rank, self.device = directory, rank, device
        self._writer = RankWriter(directory, rank)
        self._heartbeat = HeartbeatWriter(directory, rank)
        self._counters = make_counters(device)
        self._times = TimeKeeper(device)
        self._observer = observer
        self._keep_loss = keep_loss
        self._step = -1
        self._current = Phase.UNKNOWN
        self._marks: StepTimes | None = None
        self._setup_times: list[tuple[Phase, int, float]] = []
        self._peaks: dict[str, int] = {}
        self.steps_done = 0
        """Steps completed; also the number of the next step."""

    # -- life ---------------------------------------------------------------------------------

    def start(self, local_rank: int | None) -> None:
        """Write the start record and begin to observe."""
        self._writer.write(
            "start",
            {
                "local_rank": local_rank,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "device": str(self.device),
                "time": time.time(),
            },
        )
        if self._observer is not None:
            self._observer.start()

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Let memory be recognised as this model's and optimizer's."""
        if self._observer is not None:
            self._observer.watch(model, optimizer)

    def inputs(self, batch: Any) -> None:
        """Let memory be recognised as a batch's."""
        if self._observer is not None:
            self._observer.inputs(batch)

    def close(self) -> None:
        """Write what is still owed, then the end record."""
        self._write_times(wait=True)
        self._writer.write("end", {"time": time.time()})
        self._writer.close()
        self._heartbeat.close()

    def describe(self, error: BaseException) -> Failure:
        """Return ``error`` as this rank's failure, at the step and phase it is in."""
        described = describe_failure(error, self._step, self._current.value)
        described.pop("time")
        return msgspec.convert({**described, "rank": self.rank}, Failure)

    def fail(self, error: BaseException) -> None:
        """Write the failure record, and what filled the memory if that was still being observed."""
        failure = describe_failure(error, self._step, self._current.value)
        self._writer.write("failure", failure)
        if self._observer is not None:
            observer, self._observer = self._observer, None
            anatomy = observer.abort()
            if anatomy is not None:
                self._writer.write("anatomy", msgspec.to_builtins(anatomy))

    # -- steps and phases ---------------------------------------------------------------------

    @property
    def observing(self) -> bool:
        """Whether every allocation is still being watched."""
        return self._observer is not None

    @contextmanager
    def step(self, kind: StepKind | None = None) -> Iterator[None]:
        """Record one optimizer step; the first three are observed, later ones timed."""
        kind = kind or ("observed" if self.observing else "timed")
        self._step = self.steps_done
        self._counters.reset_peak()
        self._marks = StepTimes(step=self._step, start=self._times.clock.mark())
        yield
        self._marks.end = self._times.clock.mark()
        self._finish_step(kind, self._marks)

    @contextmanager
    def phase(self, phase: Phase | str, microbatch: int = 0) -> Iterator[None]:
        """Record one phase: counters at its end, peaks within it, its duration."""
        phase = Phase(phase)
        self._current = phase
        self._heartbeat.beat(self._step, phase.value)
        if self._observer is not None:
            self._observer.begin_phase(self._step, phase, microbatch)
        start = self._times.clock.mark() if self._marks else time.perf_counter()
        yield
        if self._marks:
            self._marks.phases.append((phase, microbatch, start, self._times.clock.mark()))
        else:
            self._setup_times.append((phase, microbatch, time.perf_counter() - start))
        self._finish_phase(phase, microbatch)

    def loss(self, loss: torch.Tensor) -> None:
        """Take the step's loss (call inside the step); it is copied to the host asynchronously."""
        if self._marks is None or not self._keep_loss:
            return
        slot = torch.empty((), dtype=torch.float32, pin_memory=self.device.type == "cuda")
        slot.copy_(loss.detach(), non_blocking=True)
        self._marks.loss = slot

    def write(self, record: str, fields: dict[str, Any]) -> None:
        """Append a record of another kind."""
        self._writer.write(record, fields)

    # -- inside -------------------------------------------------------------------------------

    def _finish_phase(self, phase: Phase, microbatch: int) -> None:
        state = self._counters.read()
        end, peak = state.end, state.peak
        if self._observer is not None:
            seen_end, seen_peak = self._observer.end_phase()
            if end.allocated_bytes is None:
                end, peak = seen_end, seen_peak
        self._writer.write(
            "phase",
            {
                "step": self._step,
                "phase": phase.value,
                "microbatch": microbatch,
                "end": _compact(end),
                "peak": _compact(peak),
            },
        )
        if peak.allocated_bytes is not None:
            known = self._peaks.get(phase.value, 0)
            self._peaks[phase.value] = max(known, peak.allocated_bytes)
        self._counters.reset_peak()

    def _finish_step(self, kind: StepKind, marks: StepTimes) -> None:
        state = self._counters.read()
        sample = kind != "timed" or self._step % _DEVICE_USED_EVERY == 0
        self._writer.write(
            "step",
            {
                "step": self._step,
                "kind": kind,
                "allocation_retries": state.allocation_retries,
                "out_of_memory_count": state.out_of_memory_count,
                "device_used_bytes": self._counters.device_used_bytes() if sample else None,
                "host_rss_bytes": host_rss_bytes(),
            },
        )
        self._times.add(marks)
        self._marks = None
        self.steps_done += 1
        self._write_times()
        if self._observer is not None and self.steps_done >= OBSERVED_STEPS:
            self._finish_observation()
        self._peaks = {}

    def _finish_observation(self) -> None:
        assert self._observer is not None
        observer, self._observer = self._observer, None
        anatomy = observer.finish(self._step, self._peaks or None)
        self._writer.write("anatomy", msgspec.to_builtins(anatomy))
        self._counters.reset_peak()

    def _write_times(self, *, wait: bool = False) -> None:
        if self._setup_times:
            self._writer.write("times", {"step": -1, "phases": self._setup_times})
            self._setup_times = []
        for record in self._times.ready(wait=wait):
            self._writer.write("times", record)


def _compact(counters: MemoryCounters) -> dict[str, int]:
    values = msgspec.to_builtins(counters)
    return {name: value for name, value in values.items() if value is not None}
