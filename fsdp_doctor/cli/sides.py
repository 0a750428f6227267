"""The two sides of a comparison: read what was recorded, profile what is a spec."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_doctor.cli.launching import progress_line

if TYPE_CHECKING:
    from fsdp_doctor.model.config import EffectiveConfig
    from fsdp_doctor.model.run import ModelSizes, Run


@dataclass(slots=True)
class Side:
    """What A or B turned out to be."""

    path: Path
    kind: str
    """run, spec or log."""
    runs: list[Run] = field(default_factory=list)
    config: EffectiveConfig | None = None
    """Of a job's log, by the rules of its framework; else the runs carry it."""
    sizes: ModelSizes | None = None


def gather_sides(
    a: Path, b: Path, options: Any, launches: int, runs_directory: Path
) -> tuple[Side, Side]:
    """Read both sides; profile those that are specs, their launches interleaved A B B A ...

    With ``options.force`` all earlier launches of these specs are removed first, so that none of
    a longer series is left among the new ones.
    """
    from fsdp_doctor.config.spec import load_written_spec
    from fsdp_doctor.jobs import kind_of, read_job
    from fsdp_doctor.profiler.launch import profile_many
    from fsdp_doctor.runs import load_launches

    sides = (Side(a, kind_of(a)), Side(b, kind_of(b)))
    specs = {i: load_written_spec(side.path) for i, side in enumerate(sides) if side.kind == "spec"}
    for side in sides:
        if side.kind == "run":
            side.runs = load_launches(side.path)
        elif side.kind == "log":
            job = read_job(side.path)
            side.runs, side.config, side.sizes = [job.run], job.config, job.sizes
    if specs:
        folders = {i: runs_directory / f"{'ab'[i]}-{specs[i].spec.name}" for i in specs}
        if options.force:
            for folder in folders.values():
                _remove_launches(folder)
        jobs, owners = [], []
        for number in range(launches):
            for i in sorted(specs, reverse=number % 2 == 1):
                jobs.append((specs[i], folders[i] / f"launch-{number:03d}"))
                owners.append(i)
        with progress_line() as tell:
            for i, run in zip(owners, profile_many(jobs, options, tell), strict=False):
                sides[i].runs.append(run)
    return sides


def trained_now(sides: Sequence[Side]) -> list[Run]:
    """Return the launches that this command made."""
    return [run for side in sides if side.kind == "spec" for run in side.runs]


def _remove_launches(folder: Path) -> None:
    """Remove the recorded launches in ``folder``, and nothing else that lies there."""
    from fsdp_doctor.runs.reader import is_run_directory

    for launch in folder.glob("launch-[0-9][0-9][0-9]"):
        if is_run_directory(launch):
            shutil.rmtree(launch)
