"""A rank's last sign of life: one small file that is overwritten at every phase border.

It tells a supervisor that a rank hangs, and a reader of a killed run where the rank was.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_WIDTH = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Where a rank is."""

    step: int
    """-1 during set-up."""
    phase: str
    since: float
    """Unix time (s) when the phase began."""
    pid: int


def heartbeat_path(directory: Path, rank: int) -> Path:
    """Return the heartbeat file of a rank."""
    return directory / f"rank-{rank:05d}.heartbeat"


class HeartbeatWriter:
    """Overwrites the heartbeat file in place (one ``pwrite`` of fixed width)."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = heartbeat_path(directory, rank)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def beat(self, step: int, phase: str) -> None:
        """Say that ``phase`` of ``step`` begins now."""
        text = f"{step} {phase} {time.time():.6f} {os.getpid()}"
        os.pwrite(self._descriptor, text.ljust(_WIDTH).encode() + b"\n", 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def remove(self) -> None:
        """Remove the file, once the rank has written down how it ended."""
        self._path.unlink(missing_ok=True)


def read_heartbeat(directory: Path, rank: int) -> Heartbeat | None:
    """Return the last heartbeat of a rank, or None when there is none."""
    try:
        step, phase, since, pid = heartbeat_path(directory, rank).read_text().split()
        return Heartbeat(step=int(step), phase=phase, since=float(since), pid=int(pid))
    except (OSError, ValueError):
        return None
