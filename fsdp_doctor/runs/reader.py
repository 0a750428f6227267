"""Read run directories. Their content is not trusted: wrong types give one error with the place."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.memory import Anatomy
from fsdp_doctor.model.run import (
    CheckpointRecord,
    PhaseRecord,
    RankSeries,
    Run,
    StepRecord,
    TimeBreakdown,
)
from fsdp_doctor.runs.files import load_manifest, read_records, records_of
from fsdp_doctor.runs.outcome import settled
from fsdp_doctor.runs.phases import (
    OUTSIDE_STEP,
    SETUP_STEP,
    PhaseTime,
    match_times,
    merge_parts,
)
from fsdp_doctor.runs.writer import MANIFEST_NAME, rank_file_name

__all__ = ["is_run_directory", "load_launches", "load_manifest", "load_run", "read_records"]

_STEP_FIELDS = {field.name for field in fields(StepRecord)}


def is_run_directory(path: Path) -> bool:
    """Return whether ``path`` holds a run."""
    return (path / MANIFEST_NAME).is_file()


def load_launches(path: Path) -> list[Run]:
    """Read one run, or all runs that lie directly under ``path`` (launches of one spec).

    Raises InputError when there is none.
    """
    if is_run_directory(path):
        return [load_run(path)]
    if not path.exists():
        raise InputError("no such file or directory", where=str(path))
    children = (
        sorted(child for child in path.iterdir() if is_run_directory(child))
        if path.is_dir()
        else []
    )
    if not children:
        raise InputError(
            "not a run directory",
            where=str(path),
            hint="a run directory holds run.json; record one with: fsdp-doctor profile SPEC -o DIR",
        )
    return [load_run(child) for child in children]


def load_run(directory: Path) -> Run:
    """Read a run directory.

    Torn or unknown lines become warnings of the manifest. How the run ended is what its ranks say
    where run.json says it is still running (see ``outcome``). Raises InputError when run.json is
    missing, broken or of a newer schema.
    """
    manifest = load_manifest(directory / MANIFEST_NAME)
    warnings = list(manifest.warnings)
    series = []
    for rank in manifest.ranks:
        path = directory / rank_file_name(rank)
        if path.is_file():
            series.append(_load_rank(path, rank, warnings))
        else:
            warnings.append(f"{path.name}: missing, rank {rank} recorded nothing")
            series.append(RankSeries(rank=rank))
    manifest = replace(manifest, warnings=tuple(warnings))
    return Run(
        manifest=settled(manifest, directory, series),
        ranks=tuple(series),
        directory=directory,
    )


class _Builder:
    """Collects the records of one rank."""

    def __init__(self, rank: int, warnings: list[str]) -> None:
        self.series: dict[str, Any] = {"rank": rank}
        self.warnings = warnings
        self.phases: dict[int, list[PhaseRecord]] = {}
        self.times: dict[int, list[PhaseTime]] = {}
        self.steps: dict[int, dict[str, Any]] = {}

    def add(self, record: dict[str, Any]) -> None:
        kind = record.pop("record")
        if kind == "start":
            self._take(record, ("local_rank", "host", "pid", "device"))
        elif kind == "phase":
            phase = msgspec.convert(record, PhaseRecord)
            self.phases.setdefault(phase.step, []).append(phase)
        elif kind in ("begin", "step"):
            self._step(record).update({k: v for k, v in record.items() if k in _STEP_FIELDS})
        elif kind == "times":
            self._times(record)
        elif kind == "anatomy":
            self.series["anatomy"] = msgspec.convert(record, Anatomy)
        elif kind == "time_breakdown":
            self.series["time_breakdown"] = msgspec.convert(
                record["items"], tuple[TimeBreakdown, ...]
            )
        elif kind == "checkpoint":
            self.series["checkpoint"] = msgspec.convert(record, CheckpointRecord)
        else:
            self._add_end(kind, record)

    def _add_end(self, kind: str, record: dict[str, Any]) -> None:
        if kind == "warning":
            self.warnings.append(f"rank {self.series['rank']}: {record['text']}")
        elif kind == "failure":
            step = record.get("step")
            if isinstance(step, int) and step >= 0:
                names = ("allocation_retries", "out_of_memory_count")
                self._step(record).update({k: record[k] for k in names if k in record})
        elif kind == "end":
            self.series["finished"] = True
        elif kind == "exit":
            self._take(record, ("exit_code", "signal"))

    def _take(self, record: dict[str, Any], names: tuple[str, ...]) -> None:
        self.series.update({name: record.get(name) for name in names})

    def _step(self, record: dict[str, Any]) -> dict[str, Any]:
        return self.steps.setdefault(int(record["step"]), {"step": record["step"]})

    def _times(self, record: dict[str, Any]) -> None:
        step = int(record["step"])
        if step >= 0:
            names = ("step_time_s", "loss", "loss_finite")
            self._step(record).update({k: record[k] for k in names if k in record})
        times = [(phase, micro, time_s) for phase, micro, time_s in record.get("phases", ())]
        self.times.setdefault(step, []).extend(times)

    def build(self) -> RankSeries:
        steps = []
        for step in sorted(self.steps.keys() | {s for s in self.phases if s >= 0}):
            raw_step = {"kind": "warmup", **self.steps.get(step, {"step": step})}
            record = msgspec.convert(raw_step, StepRecord)
            phases = merge_parts(self.phases.get(step, ()), self.times.get(step, ()))
            steps.append(replace(record, phases=phases))
        raw = {
            **self.series,
            "setup": self._apart(SETUP_STEP),
            "outside": self._apart(OUTSIDE_STEP),
            "steps": tuple(steps),
        }
        return RankSeries(**raw)

    def _apart(self, place: int) -> tuple[PhaseRecord, ...]:
        return match_times(self.phases.get(place, ()), self.times.get(place, ()))


def _load_rank(path: Path, rank: int, warnings: list[str]) -> RankSeries:
    builder = _Builder(rank, warnings)
    for number, record in records_of(path, warnings):
        try:
            builder.add(record)
        except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
            warnings.append(f"{path.name}:{number}: record skipped ({error})")
    return builder.build()
