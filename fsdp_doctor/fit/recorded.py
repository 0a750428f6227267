"""What recorded runs say of a spec: those whose effective fields are all the same."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from fsdp_doctor.config.diff import diff_configs
from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.errors import DoctorError, InputError
from fsdp_doctor.model.config import EffectiveConfig
from fsdp_doctor.model.fit import Measured
from fsdp_doctor.model.run import Run
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.runs import load_run
from fsdp_doctor.runs.summary import steady_peak_bytes
from fsdp_doctor.runs.writer import MANIFEST_NAME

_MOST = 2000
"""Runs of a tree that are read."""


class RecordedRuns:
    """The runs under a directory that carry a spec. Raises InputError where there is none."""

    def __init__(self, root: Path) -> None:
        manifests = sorted(root.rglob(MANIFEST_NAME))[:_MOST] if root.is_dir() else []
        self._runs: list[tuple[Run, EffectiveConfig]] = []
        for path in manifests:
            try:
                run = load_run(path.parent)
                spec = recorded_spec(run)
            except DoctorError:
                continue
            self._runs.append((run, resolve_spec(spec)))
        if not self._runs:
            raise InputError("no run with a spec is recorded here", where=str(root))

    def __call__(self, spec: ProfileSpec) -> Sequence[Measured]:
        """Return what runs of this very spec measured."""
        wanted = resolve_spec(spec)
        found = []
        for run, effective in self._runs:
            diff = diff_configs(effective, wanted)
            if not diff.changed and not diff.unknown:
                found.append(measured(run, "recorded"))
        return found


def recorded_spec(run: Run) -> ProfileSpec:
    """Return the spec of a run, of the ranks it had. Raises InputError where it carries none."""
    if run.manifest.spec is None:
        raise InputError("the run carries no spec", where=str(run.directory))
    raw = {**run.manifest.spec, "world_size": run.manifest.world_size}
    return spec_from_mapping(raw, str(run.directory))


def measured(run: Run, kind: str) -> Measured:
    """Return the peaks of a run's largest rank and the median of its slowest rank's steps."""
    manifest = run.manifest
    peaks = [steady_peak_bytes(rank) or 0 for rank in run.ranks]
    reserved = [steady_peak_bytes(rank, counter="reserved_bytes") or 0 for rank in run.ranks]
    medians = []
    for rank in run.ranks:
        times = [s.step_time_s for s in rank.steps if s.kind == "timed" and s.step_time_s]
        medians += [statistics.median(times)] if times else []
    note = None
    if manifest.source == "one_rank":
        note = f"one rank of {manifest.world_size}: its step time lacks communication"
    if manifest.failure is not None:
        note = manifest.failure.kind
    return Measured(
        source=str(run.directory),
        kind="verified" if kind == "verified" else "recorded",
        status=manifest.status,
        device_type=manifest.device_type,
        peak_allocated_bytes=max(peaks, default=0) or None,
        peak_reserved_bytes=max(reserved, default=0) or None,
        step_time_s=max(medians, default=None),
        note=note,
    )
