"""Memory snapshots beside the logs: which one tells of the failure, and as what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_doctor.errors import InputError
from fsdp_doctor.logs.allocator import fragmentation
from fsdp_doctor.logs.frames import phase_of
from fsdp_doctor.logs.records import MEMORY_KINDS, Failure
from fsdp_doctor.memory.snapshot_analysis import analyse_ranks, worst
from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.snapshot import SnapshotAnalysis

FORM = "snapshot"
"""Form of a failure that only a snapshot tells."""
_SURE = frozenset({"checkpoint_save", "checkpoint_load", "evaluation", "generation"})
"""Phases that frames tell and annotations do not."""


def read_snapshots(paths: Sequence[Path], limit_bytes: int | None = None) -> list[SnapshotAnalysis]:
    """Read the snapshots of files and directories. Raises InputError when none can be read.

    ``limit_bytes``: what a process may reserve, where a message tells.
    """
    found: list[SnapshotAnalysis] = []
    error: InputError | None = None
    for path in paths:
        try:
            found += analyse_ranks(path, limit_bytes)
        except InputError as failed:
            error = error or failed
    if not found and error is not None:
        raise error
    if error is not None:
        found[0] = replace(found[0], warnings=(*found[0].warnings, f"not read: {error}"))
    return found


def failure_of(found: SnapshotAnalysis) -> Failure | None:
    """Return the refused request of a snapshot as a failure; None where nothing was refused."""
    oom, focus = found.oom, found.focus
    if oom is None:
        return None
    frames = [log_frame(frame) for frame in oom.frames]
    step = focus.step
    private = sum(pool.reserved_bytes for pool in found.space.pools if pool.pool != (0, 0))
    failure = Failure(
        kind="device_oom",
        form=FORM,
        backend="CUDA",
        rank=found.rank,
        device=found.device,
        requested_bytes=oom.driver_bytes,
        free_bytes=oom.device_free_bytes,
        allocated_bytes=focus.allocated_bytes,
        reserved_bytes=focus.reserved_bytes,
        reserved_unallocated_bytes=focus.reserved_bytes - focus.allocated_bytes,
        private_pool_bytes=private or None,
        file=found.path,
        line=0,
        text="a refused request in a memory snapshot",
        iteration=_step(found, step),
        phase=_phase(found, "\n".join(frames)),
        frames=frames,
        order=1 << 40,
    )
    failure.fragmentation = fragmentation(failure)
    return failure


def log_frame(frame: str) -> str:
    """Return a recorded frame (``file:line function``) as the frames of logs are written."""
    place, _, function = frame.rpartition(" ")
    return f"{place} in {function}" if place else frame


def _step(found: SnapshotAnalysis, step: int | None) -> int | None:
    """Steps before it, where that many were seen; a trace that begins late tells no first step."""
    if step is None or (step <= 1 and any("older than" in text for text in found.warnings)):
        return None
    return step


def _phase(found: SnapshotAnalysis, frames: str) -> str:
    told = phase_of(frames)
    marked = found.focus.phase
    if marked is Phase.UNKNOWN or told in _SURE:
        return str(told)
    return str(marked)


def of_failure(snapshots: Sequence[SnapshotAnalysis], primary: Failure | None) -> SnapshotAnalysis:
    """Return the snapshot that tells of a failure: of its rank, else the one that failed."""
    if primary is not None and primary.rank is not None:
        own = [found for found in snapshots if found.rank == primary.rank]
        if own:
            return worst(own)
    return worst(list(snapshots))


def join_failures(failures: list[Failure], snapshots: Sequence[SnapshotAnalysis]) -> None:
    """Complete the failures of the logs by what snapshots tell; add those that no log has."""
    told = [f for f in failures if f.kind == "device_oom" and f.fatal and not f.victim]
    others = any(f.kind in MEMORY_KINDS and f.fatal and not f.victim for f in failures)
    for found in snapshots:
        own = failure_of(found)
        if own is None:
            continue
        match = next((f for f in told if _same(f, own, alone=len(snapshots) == len(told))), None)
        if match is not None:
            complete(match, own)
        elif not told and not others:
            failures.append(own)


def _same(logged: Failure, own: Failure, *, alone: bool) -> bool:
    if logged.rank is not None and own.rank is not None:
        return logged.rank == own.rank
    asked, exact = logged.requested_bytes, own.requested_bytes
    if asked is None or exact is None:
        return alone
    return abs(asked - exact) <= max(0.006 * exact, 5 << 20)


def complete(logged: Failure, own: Failure) -> None:
    """Fill what the log left open from the snapshot's account of the same failure."""
    for name in (
        *("rank", "device", "requested_bytes", "free_bytes", "allocated_bytes"),
        *("reserved_bytes", "reserved_unallocated_bytes", "iteration"),
    ):
        if getattr(logged, name) is None:
            setattr(logged, name, getattr(own, name))
    if not logged.frames:
        logged.frames = own.frames
    if logged.phase == "unknown" or (own.phase != "unknown" and logged.phase not in _LOGGED):
        logged.phase = own.phase
    if logged.fragmentation == "unknown":
        logged.fragmentation = own.fragmentation


_LOGGED = _SURE | {"graph_capture", "load", "wrap", "init", "backward", "optimizer", "data"}
"""Phases that a log's frames tell better than annotations."""
