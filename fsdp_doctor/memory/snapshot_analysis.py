"""Everything one snapshot shows; ``postmortem`` says what it means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fsdp_doctor.errors import InputError
from fsdp_doctor.memory.snapshot_files import find_snapshots
from fsdp_doctor.memory.snapshot_growth import find_growth
from fsdp_doctor.memory.snapshot_kept import find_kept_outputs, find_state_copies
from fsdp_doctor.memory.snapshot_reader import ReadLimits, Snapshot, read_snapshot
from fsdp_doctor.memory.snapshot_space import describe_space, explain_oom, ranges_at
from fsdp_doctor.memory.snapshot_view import View, view_device
from fsdp_doctor.memory.snapshot_whatif import replay_settings
from fsdp_doctor.model.snapshot import SnapshotAnalysis, StepSummary


def analyse_snapshot(
    path: Path,
    *,
    rank: int | None = None,
    limits: ReadLimits | None = None,
    limit_bytes: int | None = None,
) -> SnapshotAnalysis:
    """Read a snapshot file and explain its busiest device.

    ``limit_bytes``: what the process might reserve, where a message tells.

    Raises:
        InputError: the file cannot be read as a snapshot.
    """
    return analyse_view(load_view(path, limits), rank=rank, limit_bytes=limit_bytes)


def analyse_ranks(path: Path, limit_bytes: int | None = None) -> list[SnapshotAnalysis]:
    """Explain a file, or each rank of a directory of snapshots; one at a time in memory.

    Raises:
        InputError: there is no snapshot, or none of them can be read.
    """
    files = find_snapshots(path)
    if len(files) == 1:
        return [analyse_snapshot(files[0].path, rank=files[0].rank, limit_bytes=limit_bytes)]
    found, errors = [], []
    for file in files:
        try:
            one = analyse_snapshot(file.path, rank=file.rank, limit_bytes=limit_bytes)
            found.append(one)
        except InputError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    unread = tuple(f"not read: {error}" for error in errors)
    return [replace(found[0], warnings=(*found[0].warnings, *unread)), *found[1:]]


def worst(analyses: list[SnapshotAnalysis]) -> SnapshotAnalysis:
    """The rank to look at: one whose request failed, else the largest peak."""
    return max(
        analyses,
        key=lambda a: (a.oom is not None, a.focus.allocated_bytes, -(a.rank or 0)),
    )


def load_view(path: Path, limits: ReadLimits | None = None) -> View:
    """Read a file and replay its busiest device.

    Raises:
        InputError: the file cannot be read, or nothing was allocated in it.
    """
    snapshot = read_snapshot(path, limits)
    devices = snapshot.devices()
    if not devices:
        raise InputError(
            "the snapshot is empty: no segment, no event",
            where=str(path),
            hint="torch.cuda.memory._record_memory_history() before the job allocates",
        )
    return view_device(snapshot, devices[0])


def analyse_view(
    view: View, *, rank: int | None = None, limit_bytes: int | None = None
) -> SnapshotAnalysis:
    """Explain a device that was read."""
    snapshot, replay = view.snapshot, view.replay
    steps = view.steps()
    refused = replay.trace.where("oom")
    at = int(refused[-1]) if len(refused) else None
    peak = view.moment("peak", view.peak_position())
    failure = view.moment("failure", at) if at is not None else None
    ranges = ranges_at(snapshot, replay, replay.end if at is None else at)
    space = describe_space(snapshot, ranges, view.block)
    oom = None if at is None else explain_oom(snapshot, replay, at, len(refused), ranges)
    growth = find_growth(view, steps)
    return SnapshotAnalysis(
        path=str(snapshot.path),
        rank=rank,
        device=replay.device,
        format=_format(snapshot),
        events=len(replay.trace),
        size_bytes=snapshot.size_bytes,
        settings=snapshot.settings,
        peak=peak,
        failure=failure,
        end=view.moment("end", replay.end, tops=not replay.end),
        peak_reserved_bytes=int(replay.reserved.max()),
        steps=tuple(steps),
        timeline=view.timeline(peak.position if at is None else at),
        space=space,
        oom=oom,
        growth=growth,
        replay=None if oom is None else replay_settings(view, oom, limit_bytes),
        kept_outputs=None if at is None else find_kept_outputs(view, at),
        state_copies=None if at is None else find_state_copies(view, at),
        units=len(set(view.places.units) - {None}),
        warnings=tuple(_warnings(view, steps)),
    )


def _format(snapshot: Snapshot) -> str:
    """The torch versions whose keys these are."""
    if not snapshot.has_traces:
        return "torch 1.13 - 2.0, or without a trace"
    if not snapshot.has_time:
        return "torch 2.0 - 2.1" if any(map(len, snapshot.traces)) else "without a trace"
    return "torch 2.5 or later" if len(snapshot.note_names) else "torch 2.2 or later"


def _warnings(view: View, steps: list[StepSummary]) -> list[str]:
    """What limits the analysis."""
    replay, snapshot = view.replay, view.snapshot
    found = list(replay.notes)
    blocks = replay.blocks
    older = np.flatnonzero((blocks.born < 0) & (blocks.died >= 0))
    nameless = int(blocks.size[older][blocks.stack[older] < 0].sum())
    if not replay.end:
        found.append("no events: only the state at the dump is known, not its history")
    elif nameless > replay.allocated.max() // 50:
        share = nameless / max(int(replay.allocated.max()), 1)
        found.append(
            f"blocks of {nameless} bytes ({share:.0%} of the peak) are older than the history: "
            "nobody knows what they hold; record from the start, or with more max_entries"
        )
    if replay.end and not steps:
        found.append("no steps recognised: neither annotations nor stacks name forward")
    others = [d for d in snapshot.devices() if d != replay.device and _used(snapshot, d)]
    if others:
        named = ", ".join(map(str, others[:8]))
        found.append(f"device {replay.device} is shown; the snapshot also holds device {named}")
    if replay.reserved.min() < 0:
        found.append("segments and trace contradict each other: reserved memory is not exact")
    return found


def _used(snapshot: Snapshot, device: int) -> bool:
    return bool((snapshot.segments["device"] == device).any())
