"""How a run ended whose run.json cannot know: rank 0 was killed, or ended before another failed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import Failure, RankSeries, RunManifest, RunStatus
from fsdp_doctor.runs.files import read_records
from fsdp_doctor.runs.heartbeat import read_heartbeat
from fsdp_doctor.runs.verdict import first_failure

_STARTED_LATER_S = 2.0
"""A process that is this much younger than the rank's start record has only taken its number."""


def settled(manifest: RunManifest, directory: Path, series: Sequence[RankSeries]) -> RunManifest:
    """Return the manifest with the status that the ranks' own records tell.

    Nothing changes while a rank is alive on this host, or may be on another.
    """
    own_loop = manifest.status == "completed" and manifest.source == "recorded"
    if manifest.status != "running" and not own_loop:
        return manifest
    open_ended = [one for one in series if not one.finished]
    started = [one for one in series if one.pid is not None]
    if not started or any(_alive(directory, one) for one in open_ended):
        return manifest
    try:
        failure = first_failure(directory, manifest.ranks) or _gone(directory, open_ended)
    except (KeyError, TypeError, ValueError) as error:
        text = f"how the run ended cannot be read: {type(error).__name__}: {error}"
        return replace(manifest, warnings=(*manifest.warnings, text))
    if failure is not None:
        lost = {one.rank for one in open_ended if one.pid is not None} - {failure.rank}
        victims = tuple(sorted(lost.union(failure.victims)))
        status: RunStatus = "interrupted" if failure.kind == "interrupted" else "failed"
        return replace(manifest, status=status, failure=replace(failure, victims=victims))
    return manifest if open_ended else replace(manifest, status="completed")


def _gone(directory: Path, open_ended: Sequence[RankSeries]) -> Failure | None:
    """What is known of ranks of this host that left without a word; None when there are none."""
    host = socket.gethostname()
    silent = [one for one in open_ended if one.pid is not None and one.host == host]
    if not silent:
        return None
    first = silent[0]
    beat = read_heartbeat(directory, first.rank)
    return Failure(
        kind="exit",
        message="the process is gone and left no word: it was killed, or its host went down",
        rank=first.rank,
        step=beat.step if beat else None,
        phase=Phase(beat.phase) if beat else None,
    )


def _alive(directory: Path, series: RankSeries) -> bool:
    """Whether the process of a rank still runs on this host."""
    if series.pid is None or series.host != socket.gethostname():
        return False
    began = next(
        (r.get("time") for r in read_records(directory, series.rank) if r["record"] == "start"),
        None,
    )
    started = _process_start(series.pid)
    return started is not None and (
        not isinstance(began, (int, float)) or started < began + _STARTED_LATER_S
    )


def _process_start(pid: int) -> float | None:
    """Unix time at which a process started; None when there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        state, ticks = fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
    return None if state == "Z" else time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")
