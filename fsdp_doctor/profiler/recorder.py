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

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.memory import Anatomy, MemoryCounters, Phase
from fsdp_doctor.model.run import Failure
from fsdp_doctor.profiler.clock import StepTimes, TimeKeeper
from fsdp_doctor.profiler.counters import AllocatorState, host_rss_bytes, make_counters
from fsdp_doctor.profiler.failures import describe_failure
from fsdp_doctor.profiler.observe import Observer
from fsdp_doctor.profiler.observe.guard import GuardedObserver
from fsdp_doctor.profiler.segments import Gaps, Segment, SegmentMemory
from fsdp_doctor.redact import redact_text
from fsdp_doctor.runs.heartbeat import HeartbeatWriter
from fsdp_doctor.runs.phases import OUTSIDE_STEP, SETUP_STEP
from fsdp_doctor.runs.writer import RankWriter

StepKind = Literal["observed", "warmup", "timed", "checkpoint", "kernel_profile"]

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
        self._observer = GuardedObserver(observer, self.warn)
        self._memory = SegmentMemory(self._counters, self._observer)
        self._keep_loss = keep_loss
        self._step, self._kind = SETUP_STEP, "observed"
        self._marks: StepTimes | None = None
        self._segment: Segment | None = None
        self._stack: list[tuple[Phase, int]] = []
        self._kept: int | None = None
        self._left: BaseException | None = None
        self._gaps, self._gaps_told = Gaps(), False
        self._outside_times: dict[int, list[tuple[Phase, int, float]]] = {}
        self._peaks: dict[str, int] = {}
        self._last_done: int | None = None
        self._ended: float | None = None
        self.steps_done = 0
        """Steps begun and ended; also the number of the next step."""

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
        self._observer.start()

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Let memory be recognised as this model's and optimizer's."""
        self._observer.watch(model, optimizer)

    def inputs(self, batch: Any) -> None:
        """Let memory be recognised as a batch's."""
        self._observer.inputs(batch)

    def close(self) -> None:
        """End the observation, write what is still owed, then the end record."""
        try:
            self._abandon_step()
            self._end_observation_early()
            self._write_times(self._times.ready(wait=True))
            self._writer.write("end", {"time": time.time()})
        finally:
            self._observer.abort()
            self._close_files()

    def fail(self, error: BaseException) -> None:
        """Write the failure record, the memory of its moment, and what filled it where observed."""
        described = self._describe(error)
        try:
            self._write_failure(described)
            self._write_anatomy(self._observer.abort())
        finally:
            self._observer.abort()
            self._close_files()

    def describe(self, error: BaseException) -> Failure:
        """Return ``error`` as this rank's failure, at the step and phase it is in."""
        described = self._describe(error)
        described.pop("time")
        return msgspec.convert({**described, "rank": self.rank}, Failure)

    def remove_heartbeat(self) -> None:
        """Remove the sign of life: only a process that was killed leaves it behind."""
        self._heartbeat.remove()

    # -- steps and phases ---------------------------------------------------------------------

    @property
    def observing(self) -> bool:
        """Whether every allocation is still being watched."""
        return self._observer.active

    @contextmanager
    def step(self, kind: StepKind | None = None) -> Iterator[None]:
        """Record one optimizer step; the first three are observed, later ones timed."""
        self._begin_step(kind or ("observed" if self.observing else "timed"))
        try:
            yield
        except BaseException as error:
            self._left = error
            raise
        self._end_step()

    @contextmanager
    def phase(self, phase: Phase | str, microbatch: int = 0) -> Iterator[None]:
        """Record one phase: counters at its end, peaks within it, its duration.

        A phase inside another interrupts it. Work of a step outside of phases is phase
        ``unknown``. Phases outside of steps are recorded apart, and timed by the host.
        """
        self._enter(_known(phase), microbatch)
        depth = len(self._stack)
        try:
            yield
        except BaseException:
            self._kept = depth - 1
            raise
        self._leave(depth)

    def loss(self, loss: torch.Tensor) -> None:
        """Take the step's loss (call inside the step); it is copied to the host asynchronously."""
        if self._marks is None or not self._keep_loss:
            return
        value = loss.detach()
        if self.device.type == "cuda" and value.is_cuda:
            # in the loss's own dtype: a cast would allocate on the device
            slot = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._marks.loss = slot.copy_(value.reshape(()), non_blocking=True)
        else:
            self._marks.loss = float(value)

    def write(self, record: str, fields: dict[str, Any]) -> None:
        """Append a record of another kind."""
        self._writer.write(record, fields)

    def warn(self, text: str) -> None:
        """Append a warning that readers of the run shall see."""
        self._writer.write("warning", {"text": redact_text(text)})

    # -- inside: steps ------------------------------------------------------------------------

    def _begin_step(self, kind: StepKind) -> None:
        self._abandon_step()
        if self._marks is not None:
            raise InputError("a step began inside another", hint="end step() before the next one")
        self._close_segment()
        gap = None if self._ended is None else time.perf_counter() - self._ended
        self._step, self._kind = self.steps_done, kind
        self._writer.write("begin", {"step": self._step, "kind": kind, "gap_s": gap})
        self._heartbeat.beat(self._step, Phase.UNKNOWN.value)
        self._gaps, self._peaks = Gaps(), {}
        self._memory.restart()
        self._marks = StepTimes(step=self._step, start=self._times.clock.mark())
        self._open_gap()

    def _end_step(self) -> None:
        marks = self._marks
        assert marks is not None
        self._close_segment()
        self._stack.clear()
        self._kept = None
        self._gaps_told = self._gaps_told or self._gaps.worked
        marks.end = self._times.clock.mark()
        marks.gaps = self._gaps_told or not marks.phases
        if marks.gaps:
            self._write_phase(Phase.UNKNOWN, 0, self._gaps.end, self._gaps.peak)
        self._write_step()
        self._times.add(marks)
        self._marks, self._last_done, self._ended = None, self._step, time.perf_counter()
        self.steps_done += 1
        self._write_times(self._times.ready())
        if self.steps_done >= OBSERVED_STEPS:
            self._end_observation(self._step)

    def _abandon_step(self) -> None:
        """Give up a step that an exception left and that the loop went on without."""
        if self._left is None:
            return
        self._close_segment()
        self._stack.clear()
        self._left = self._kept = self._marks = self._ended = None
        self.steps_done += 1

    def _write_step(self) -> None:
        state = self._counters.read()
        sample = self._kind != "timed" or self._step % _DEVICE_USED_EVERY == 0
        self._writer.write(
            "step",
            {
                "step": self._step,
                "kind": self._kind,
                "allocation_retries": state.allocation_retries,
                "out_of_memory_count": state.out_of_memory_count,
                "device_used_bytes": self._counters.device_used_bytes() if sample else None,
                "host_rss_bytes": host_rss_bytes(),
            },
        )

    # -- inside: phases -----------------------------------------------------------------------

    @property
    def _place(self) -> int:
        """The step number under which a phase is written now."""
        if self._marks is not None:
            return self._step
        return SETUP_STEP if self._step < 0 else OUTSIDE_STEP

    def _enter(self, phase: Phase, microbatch: int) -> None:
        self._abandon_step()
        self._close_segment()
        if self._kept is not None:  # phases that an exception left
            del self._stack[self._kept :]
            self._kept = None
        self._stack.append((phase, microbatch))
        self._open(phase, microbatch)

    def _leave(self, depth: int) -> None:
        self._close_segment()
        del self._stack[depth - 1 :]
        self._kept = None
        if self._stack:
            self._open(*self._stack[-1])
        elif self._marks is not None:
            self._open_gap()

    def _open(self, phase: Phase, microbatch: int) -> None:
        self._heartbeat.beat(self._place, phase.value)
        self._memory.begin(self._place, phase, microbatch)
        start = self._times.clock.mark() if self._marks else time.perf_counter()
        self._segment = Segment(phase, microbatch, start)

    def _open_gap(self) -> None:
        self._memory.begin(self._step, Phase.UNKNOWN, 0)
        self._segment = Segment(Phase.UNKNOWN, 0, None, named=False)

    def _close_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        if segment.named:
            self._note_time(segment)
        end, peak, rise = self._memory.end()
        if not segment.named:
            self._gaps.add(end, peak, rise)
            return
        self._write_phase(segment.phase, segment.microbatch, end, peak)

    def _note_time(self, segment: Segment) -> None:
        if self._marks is not None:
            end = self._times.clock.mark()
            self._marks.phases.append((segment.phase, segment.microbatch, segment.start, end))
        else:
            seconds = time.perf_counter() - segment.start
            known = self._outside_times.setdefault(self._place, [])
            known.append((segment.phase, segment.microbatch, seconds))

    def _write_phase(
        self, phase: Phase, microbatch: int, end: MemoryCounters, peak: MemoryCounters
    ) -> None:
        self._writer.write(
            "phase",
            {
                "step": self._place,
                "phase": phase.value,
                "microbatch": microbatch,
                "end": _compact(end),
                "peak": _compact(peak),
            },
        )
        if self._marks is not None and peak.allocated_bytes is not None:
            known = self._peaks.get(phase.value, 0)
            self._peaks[phase.value] = max(known, peak.allocated_bytes)

    # -- inside: ends -------------------------------------------------------------------------

    def _end_observation(self, step: int) -> None:
        if self._observer.active:
            anatomy = self._observer.finish(step, self._peaks or None)
            self._write_anatomy(anatomy)
            self._counters.reset_peak()

    def _end_observation_early(self) -> None:
        """End it although fewer steps were made than it takes to be steady."""
        if self._observer.active and self._last_done is not None:
            self.warn(
                f"only {self.steps_done} steps were made: the memory observed is not that of a "
                f"steady step, which takes {OBSERVED_STEPS}"
            )
            self._end_observation(self._last_done)

    def _write_anatomy(self, anatomy: Anatomy | None) -> None:
        if anatomy is not None:
            self._writer.write("anatomy", msgspec.to_builtins(anatomy))

    def _write_times(self, records: list[dict[str, Any]]) -> None:
        for place, phases in self._outside_times.items():
            self._writer.write("times", {"step": place, "phases": phases})
        self._outside_times = {}
        for record in records:
            self._writer.write("times", record)

    def _describe(self, error: BaseException) -> dict[str, Any]:
        own = (error, error.__cause__, error.__context__)
        if self._left is not None and self._left not in own:
            self._abandon_step()
        step = None if self._place == OUTSIDE_STEP else self._place
        phase = Phase.UNKNOWN if self._segment is None else self._segment.phase
        return describe_failure(error, step, phase.value)

    def _write_failure(self, described: dict[str, Any]) -> None:
        """Write down the failing moment; nothing here waits for the device."""
        segment = self._segment
        state: AllocatorState | None = None
        try:
            state = self._memory.state()
            times = self._times.rest()
        except RuntimeError as error:  # the device is in no state to be asked
            self.warn(f"the failing moment is not known in full: {error}")
            times = []
        if state is not None:
            described["allocation_retries"] = state.allocation_retries
            described["out_of_memory_count"] = state.out_of_memory_count
        self._writer.write("failure", described)
        if segment is not None and state is not None:
            self._write_phase(segment.phase, segment.microbatch, state.end, state.peak)
        self._write_times(times)

    def _close_files(self) -> None:
        self._writer.close()
        self._heartbeat.close()


def _known(phase: Phase | str) -> Phase:
    try:
        return Phase(phase)
    except ValueError:
        names = ", ".join(known.value for known in Phase)
        raise InputError(f"there is no phase {phase!r}", hint=f"known phases: {names}") from None


def _compact(counters: MemoryCounters) -> dict[str, int]:
    values = msgspec.to_builtins(counters)
    return {name: value for name, value in values.items() if value is not None}
