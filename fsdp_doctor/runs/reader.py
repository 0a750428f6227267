"""Read run directories. Their content is not trusted: wrong types give one error with the place."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
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
from fsdp_doctor.runs.files import load_manifest, read_records, records_of, whole_record
from fsdp_doctor.runs.outcome import settled
from fsdp_doctor.runs.phases import (
    OUTSIDE_STEP,
    SETUP_STEP,
    PhaseTime,
    match_times,
    merge_parts,
)
from fsdp_doctor.runs.writer import LONG_BYTES, MANIFEST_NAME, rank_file_name

__all__ = ["is_run_directory", "load_launches", "load_manifest", "load_run", "read_records"]

PARALLEL_BYTES = 1 << 25
"""A process for each so many bytes of a run."""
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
    for one, said in read_ranks(directory, manifest.ranks):
        series.append(one)
        warnings += said
    manifest = replace(manifest, warnings=tuple(warnings))
    return Run(
        manifest=settled(manifest, directory, series),
        ranks=tuple(series),
        directory=directory,
    )


def read_ranks(directory: Path, ranks: Sequence[int]) -> Iterator[tuple[RankSeries, Sequence[str]]]:
    """Yield every rank's series and warnings; large runs are read by several processes."""
    files = [directory / rank_file_name(rank) for rank in ranks]
    workers = _workers(files)
    if workers < 2:
        yield from map(_read_rank, files, ranks)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        yield from pool.map(_read_rank, files, ranks, chunksize=4)


def _workers(files: Sequence[Path]) -> int:
    """Return how many processes may read: one where others' threads or a GPU forbid to fork."""
    if "torch" in sys.modules or threading.active_count() > 1:
        return 1
    size = sum(file.stat().st_size for file in files if file.is_file())
    return min(len(os.sched_getaffinity(0)), 16, size // PARALLEL_BYTES)


def _read_rank(path: Path, rank: int) -> tuple[RankSeries, list[str]]:
    warnings: list[str] = []
    if not path.is_file():
        return RankSeries(rank=rank), [f"{path.name}: missing, rank {rank} recorded nothing"]
    return _load_rank(path, rank, warnings), warnings


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

    def holds_steps(self) -> bool:
        """Return whether a record of a step was among those added."""
        places = (*self.steps, *self.phases, *self.times)
        return any(place >= 0 for place in places)

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
    """Read a rank's file, a long one into columns where nothing in it is unusual."""
    if path.stat().st_size >= LONG_BYTES:
        from fsdp_doctor.runs.fast_reader import read_columns
        from fsdp_doctor.runs.kept_columns import kept_columns

        load = partial(load_steps, path, rank)
        fast = kept_columns(path, load) or read_columns(path, load)
        if fast is not None:
            said: list[str] = []
            builder = _Builder(rank, [])
            for number, line in fast.others:
                record = whole_record(line, f"{path.name}:{number}", said)
                if record is not None:
                    _add(builder, record, f"{path.name}:{number}", said)
            if not builder.holds_steps():
                warnings += [*said, *builder.warnings]
                return replace(builder.build(), steps=fast.columns)
    return _load_carefully(path, rank, warnings)


def load_steps(path: Path, rank: int) -> tuple[StepRecord, ...]:
    """Return the steps of a rank's file as records."""
    return tuple(_load_carefully(path, rank, []).steps)


def _load_carefully(path: Path, rank: int, warnings: list[str]) -> RankSeries:
    builder = _Builder(rank, warnings)
    for number, record in records_of(path, warnings):
        _add(builder, record, f"{path.name}:{number}", warnings)
    return builder.build()


def _add(builder: _Builder, record: dict[str, Any], where: str, warnings: list[str]) -> None:
    try:
        builder.add(record)
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        warnings.append(f"{where}: record skipped ({error})")
