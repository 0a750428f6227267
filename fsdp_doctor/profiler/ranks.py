"""Processes of ranks: forked from a parent that outlives them and writes down how they ended.

The parent imports no CUDA and no process group, so a fork is safe and cheap. No torch here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from fsdp_doctor.runs.writer import RankWriter

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere nothing)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def fork_rank(run: Callable[[], int]) -> int:
    """Fork a process that runs ``run`` and exits with its result; return its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent()
        if os.getppid() == parent:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            status = run()
    finally:
        with contextlib.suppress(OSError, ValueError):  # a closed or full output ends no worse
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def record_exit(directory: Path, rank: int, wait_status: int, *, stopped: bool) -> int:
    """Append how a rank ended to its file; return its exit code (128 + signal when killed).

    ``stopped``: this tool ended it, because another rank had failed.
    """
    number = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else None
    code = None if number else os.waitstatus_to_exitcode(wait_status)
    record = {"exit_code": code, "signal": number, "stopped": stopped, "time": time.time()}
    with contextlib.suppress(OSError):  # a full disk must not hide how the rank ended
        writer = RankWriter(directory, rank)
        writer.write("exit", record)
        writer.close()
    return 128 + number if number else code or 0


class RankProcesses:
    """The rank processes that this one forked."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[int, int] = {}
        self._stopped = False

    def start(self, rank: int, run: Callable[[], int]) -> None:
        """Fork a rank."""
        self._running[fork_rank(run)] = rank

    def stop(self) -> None:
        """Kill all that still run."""
        self._stopped = True
        kill_all(self._running)

    def wait(self, grace_s: float = 5.0) -> int:
        """Wait for all; return the first non-zero exit code, or 0.

        As soon as one fails the others get ``grace_s`` seconds to notice by themselves (their
        exceptions tell who they waited for), then they are killed.
        """
        first, deadline = 0, None
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in self._running:
                rank = self._running.pop(pid)
                killed = self._stopped and os.WIFSIGNALED(status)
                code = record_exit(self._directory, rank, status, stopped=killed)
                if code and not first:
                    first, deadline = code, time.monotonic() + grace_s
            elif pid == 0:
                if deadline is not None and time.monotonic() > deadline:
                    self.stop()
                    deadline = None
                time.sleep(0.02)
        return first


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL every pid; those already gone are no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
