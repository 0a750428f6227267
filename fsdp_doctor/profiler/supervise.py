"""Watch running ranks: progress, time limits per phase, clean ends. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fsdp_doctor.profiler.ranks import kill_all
from fsdp_doctor.runs.heartbeat import Heartbeat, read_heartbeat

POLL_S = 0.05
STACK_DUMP_WAIT_S = 1.0
TERMINATE_WAIT_S = 10.0

Progress = Callable[[str], None]


class RunningLaunch(Protocol):
    """A launch in progress."""

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""

    def stop(self) -> None:
        """End it (SIGTERM, then SIGKILL)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a launch ended."""

    exit_code: int
    hung_ranks: tuple[int, ...] = ()
    """Ranks that outstayed the time limit of a phase."""
    interrupted: bool = False
    heartbeats: tuple[tuple[int, Heartbeat], ...] = ()
    """Last sign of life of each rank when it was stopped."""


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[1])
    except (OSError, IndexError, ValueError):
        return None


def process_alive(pid: int) -> bool:
    """Return whether a process of this pid exists and is not a zombie."""
    known = _state_and_parent(pid)
    return known is not None and known[0] != "Z"


def _is_descendant(pid: int) -> bool:
    """Return whether ``pid`` was started by this process: ranks of other hosts may share a pid."""
    own = os.getpid()
    while pid > 1 and pid != own:
        known = _state_and_parent(pid)
        pid = known[1] if known is not None else 0
    return pid == own


def supervise(
    launch: RunningLaunch,
    directory: Path,
    ranks: Sequence[int],
    phase_limit_s: float,
    progress: Progress,
) -> Outcome:
    """Wait for a launch; end it when a rank stays in one phase longer than ``phase_limit_s``.

    KeyboardInterrupt (Ctrl-C) ends it too. When this returns, no rank process that this launch
    started is alive.
    """
    shown = ""
    try:
        while True:
            code = launch.poll()
            beats = _heartbeats(directory, ranks)
            if code is not None:
                return Outcome(exit_code=code, heartbeats=tuple(beats.items()))
            now = time.time()
            hung = [rank for rank, beat in beats.items() if now - beat.since > phase_limit_s]
            if hung:
                return _end_hang(launch, hung, beats)
            text = _describe(beats)
            if text and text != shown:
                progress(text)
                shown = text
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        beats = _heartbeats(directory, ranks)
        _end(launch, beats)
        return Outcome(exit_code=130, interrupted=True, heartbeats=tuple(beats.items()))
    finally:
        kill_all(_alive(_heartbeats(directory, ranks)))


def _heartbeats(directory: Path, ranks: Sequence[int]) -> dict[int, Heartbeat]:
    return {r: beat for r in ranks if (beat := read_heartbeat(directory, r)) is not None}


def _alive(beats: dict[int, Heartbeat]) -> list[int]:
    pids = [beat.pid for beat in beats.values()]
    return [pid for pid in pids if process_alive(pid) and _is_descendant(pid)]


def _describe(beats: dict[int, Heartbeat]) -> str:
    if not beats:
        return ""
    rank, slowest = min(beats.items(), key=lambda item: (item[1].step, item[1].since))
    place = f"step {slowest.step}" if slowest.step >= 0 else "set-up"
    return f"rank {rank}: {place}, {slowest.phase}"


def _end_hang(launch: RunningLaunch, hung: list[int], beats: dict[int, Heartbeat]) -> Outcome:
    for pid in _alive(beats):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACK_DUMP_WAIT_S)
    _end(launch, beats)
    return Outcome(exit_code=1, hung_ranks=tuple(hung), heartbeats=tuple(beats.items()))


def _end(launch: RunningLaunch, beats: dict[int, Heartbeat]) -> None:
    kill_all(_alive(beats))
    deadline = time.monotonic() + TERMINATE_WAIT_S
    while launch.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if launch.poll() is None:
        launch.stop()
