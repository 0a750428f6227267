"""Read run directories. Their content is not trusted: wrong types give one error with the place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.memory import Anatomy
from fsdp_doctor.model.run import (
    PhaseRecord,
    RankSeries,
    Run,
    RunManifest,
    StepRecord,
    TimeBreakdown,
)
from fsdp_doctor.runs.writer import MANIFEST_NAME, SCHEMA, rank_file_name

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

    Torn or unknown lines become warnings of the manifest. Raises InputError when run.json is
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
    return Run(
        manifest=replace(manifest, warnings=tuple(warnings)),
        ranks=tuple(series),
        directory=directory,
    )


def load_manifest(path: Path) -> RunManifest:
    """Read run.json; InputError when it is missing, broken or of a newer schema."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
        schema = raw.get("schema") if isinstance(raw, dict) else None
        if not isinstance(schema, int) or schema > SCHEMA:
            raise InputError(
                f"schema {schema!r} is not known to this version (newest: {SCHEMA})",
                where=str(path),
                hint="upgrade fsdp-doctor",
            )
        return msgspec.convert(raw, RunManifest)
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"not a valid run manifest: {error}", where=str(path)) from None


def _records(path: Path, warnings: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    decoder = msgspec.json.Decoder()
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                record = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                torn = "torn by a crash" if not line.endswith(b"\n") else "not JSON"
                warnings.append(f"{path.name}:{number}: line skipped ({torn})")
                continue
            if isinstance(record, dict) and isinstance(record.get("record"), str):
                yield number, record
            else:
                warnings.append(f"{path.name}:{number}: line skipped (not a record)")


def read_records(directory: Path, rank: int) -> list[dict[str, Any]]:
    """Return a rank's raw records, whole lines only; none when the file is missing."""
    path = directory / rank_file_name(rank)
    return [record for _, record in _records(path, [])] if path.is_file() else []


class _Builder:
    """Collects the records of one rank."""

    def __init__(self, rank: int) -> None:
        self.series: dict[str, Any] = {"rank": rank}
        self.phases: dict[int, list[PhaseRecord]] = {}
        self.steps: dict[int, dict[str, Any]] = {}

    def add(self, record: dict[str, Any]) -> None:
        kind = record.pop("record")
        if kind == "start":
            self._take(record, ("local_rank", "host", "pid", "device"))
        elif kind == "phase":
            phase = msgspec.convert(record, PhaseRecord)
            self.phases.setdefault(phase.step, []).append(phase)
        elif kind == "step":
            self._step(record).update({k: v for k, v in record.items() if k in _STEP_FIELDS})
        elif kind == "times":
            self._times(record)
        elif kind == "anatomy":
            self.series["anatomy"] = msgspec.convert(record, Anatomy)
        elif kind == "time_breakdown":
            self.series["time_breakdown"] = msgspec.convert(
                record["items"], tuple[TimeBreakdown, ...]
            )
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
        times = {(phase, micro): time_s for phase, micro, time_s in record.get("phases", ())}
        self.phases[step] = [
            replace(known, time_s=times.get((known.phase, known.microbatch)))
            for known in self.phases.get(step, ())
        ]

    def build(self) -> RankSeries:
        steps = []
        for step in sorted(self.steps.keys() | {s for s in self.phases if s >= 0}):
            raw_step = {"kind": "warmup", **self.steps.get(step, {"step": step})}
            record = msgspec.convert(raw_step, StepRecord)
            steps.append(replace(record, phases=tuple(self.phases.get(step, ()))))
        raw = {**self.series, "setup": tuple(self.phases.get(-1, ())), "steps": tuple(steps)}
        return RankSeries(**raw)


def _load_rank(path: Path, rank: int, warnings: list[str]) -> RankSeries:
    builder = _Builder(rank)
    for number, record in _records(path, warnings):
        try:
            builder.add(record)
        except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
            warnings.append(f"{path.name}:{number}: record skipped ({error})")
    return builder.build()
