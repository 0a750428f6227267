"""Runs over time: where a metric changed for good, and what else changed there.

Runs of one name are one series, in the order in which they were made. Bytes are exact: a new level
is a change when the runs after it keep it; a single run that falls back was an exception. Times are
noisy: a series is divided where its launches before and after differ most (binary segmentation, at
least MIN_LAUNCHES a side, Welch's interval wholly beyond the band), by a p-value that is adjusted
for the number of places tried, so that noise gives an alarm in less than 5 % of series.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fsdp_doctor.attribution.compare import effective_config
from fsdp_doctor.attribution.environments import environment_differences
from fsdp_doctor.attribution.metrics import VARYING_SHARE
from fsdp_doctor.attribution.observations import VARYING, Place, observe
from fsdp_doctor.attribution.statistics import (
    ALPHA,
    CLAIM_FLOOR,
    DEFAULT_BAND,
    MIN_LAUNCHES,
    memory_threshold,
    time_verdict,
    welch,
)
from fsdp_doctor.attribution.times import launch_times
from fsdp_doctor.config.diff import diff_configs
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import ConfigChange
from fsdp_doctor.model.run import Run
from fsdp_doctor.runs import load_run
from fsdp_doctor.runs.reader import is_run_directory

MEMORY_NAMES = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "resident_bytes",
    "outside_pytorch_bytes",
    "allocation_retries",
)
MAX_RUNS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A run of the history: one launch, or several of one spec that lie side by side."""

    directory: Path
    launches: tuple[Run, ...]
    values: dict[str, float | int | None]
    """Metric -> value over all ranks and launches, as ``compare`` has it; None: not recorded."""
    log_times: tuple[float, ...]
    """Log of the median step time of each launch that has timed steps."""

    @property
    def name(self) -> str:
        """The series it belongs to."""
        return self.launches[0].manifest.name

    @property
    def created(self) -> str:
        """When its first launch was made (ISO 8601)."""
        return min(run.manifest.created for run in self.launches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A metric that went to another level and stayed there."""

    metric: str
    before: Entry
    """The last run of the level before."""
    at: Entry
    """The first run of the new level."""
    a: float | int
    b: float | int
    p: float | None = None
    """Of no change, for times; adjusted for the places tried."""
    confirmed: bool = True
    """Whether a later run has the new level too (bytes), or the statistics say so (times)."""
    fields: tuple[ConfigChange, ...] = ()
    """Effective fields that differ between the two runs."""
    environment: dict[str, str] | None = None
    """Versions and other facts that differ, as ``before -> at``."""


def read_history(directory: Path) -> list[Entry]:
    """Return the runs of a directory tree, oldest first.

    Raises InputError when there is none.
    """
    if not directory.is_dir():
        raise InputError("no such directory", where=str(directory))
    groups: dict[Path, list[Path]] = {}
    for place in _run_directories(directory):
        parent = place.parent if place.name.startswith("launch-") else place
        groups.setdefault(parent, []).append(place)
    if not groups:
        raise InputError("no runs in this tree", where=str(directory))
    entries = [_entry(parent, places) for parent, places in groups.items()]
    return sorted(entries, key=lambda entry: (entry.created, str(entry.directory)))


def _run_directories(directory: Path) -> Iterator[Path]:
    found = 0
    for root, folders, _ in os.walk(directory):
        folders.sort()
        place = Path(root)
        if is_run_directory(place):
            folders.clear()
            found += 1
            yield place
            if found >= MAX_RUNS:
                return


def _entry(directory: Path, places: Sequence[Path]) -> Entry:
    runs = tuple(load_run(place) for place in sorted(places))
    values: dict[str, float | int | None] = dict.fromkeys(MEMORY_NAMES)
    for run in runs:
        observed = observe(run)
        for name in MEMORY_NAMES:
            number = observed.get(Place(name, None))
            if number is not None:
                values[name] = max(number.value, int(values[name] or 0))
    steps = [times.step for run in runs if (times := launch_times(run)).step.size]
    log_times = tuple(float(np.log(np.median(step))) for step in steps)
    values["step_time_s"] = float(np.exp(np.mean(log_times))) if log_times else None
    tokens = next((t for run in runs if (t := run.manifest.tokens_per_step)), None)
    step_time = values["step_time_s"]
    values["tokens_per_s"] = tokens / step_time if tokens and step_time else None
    return Entry(directory=directory, launches=runs, values=values, log_times=log_times)


def find_changes(entries: Sequence[Entry], *, band: float = DEFAULT_BAND) -> list[Change]:
    """Return where metrics changed for good, in the order of time; failed runs are passed over."""
    series: dict[str, list[Entry]] = {}
    for entry in entries:
        if any(run.manifest.status == "completed" for run in entry.launches):
            series.setdefault(entry.name, []).append(entry)
    found = [
        change
        for of_name in series.values()
        for change in (*_memory_changes(of_name), *_time_changes(of_name, band))
    ]
    return sorted(found, key=lambda change: (change.at.created, change.metric))


def _memory_changes(entries: Sequence[Entry]) -> Iterator[Change]:
    for name in MEMORY_NAMES:
        known = [(e, int(v)) for e in entries if (v := e.values[name]) is not None]
        start = 0  # of the level that holds
        for i in range(1, len(known)):
            level, value = known[start][1], known[i][1]
            if not _differ(name, level, value):
                continue
            later = [number for _, number in known[i + 1 : i + 2]]
            if later and _differ(name, value, later[0]):
                continue  # an exception, or one step of several: the next run decides
            before = [e for e, number in known[start:i] if not _differ(name, level, number)][-1]
            yield _change(name, before, known[i][0], level, value, confirmed=bool(later))
            start = i


def _differ(name: str, a: int, b: int) -> bool:
    least = 1 if name == "allocation_retries" else memory_threshold(a)
    if name in VARYING:
        least = max(least, int(VARYING_SHARE * a))
    return abs(b - a) >= least


def _time_changes(entries: Sequence[Entry], band: float) -> Iterator[Change]:
    known = [entry for entry in entries if entry.log_times]
    for i, p in _divide(known, 0, len(known), band):
        a, b = known[i - 1].values["step_time_s"], known[i].values["step_time_s"]
        assert a is not None
        assert b is not None
        yield _change("step_time_s", known[i - 1], known[i], a, b, p=p)


def _divide(entries: Sequence[Entry], first: int, end: int, band: float) -> list[tuple[int, float]]:
    """Return the places where the series is divided, with their p-values."""
    best: tuple[float, int] | None = None
    tried = 0
    for i in range(first + 1, end):
        sides = [
            [time for entry in part for time in entry.log_times]
            for part in (entries[first:i], entries[i:end])
        ]
        if min(map(len, sides)) < MIN_LAUNCHES:
            continue
        tried += 1
        test = welch(*sides, floor=CLAIM_FLOOR)
        firm = time_verdict(test, band=band) in ("worse", "better")
        if firm and test.p is not None and (best is None or test.p < best[0]):
            best = (test.p, i)
    if best is None or best[0] * tried >= ALPHA:
        return []
    p, place = best
    return [
        *_divide(entries, first, place, band),
        (place, p * tried),
        *_divide(entries, place, end, band),
    ]


def _change(
    metric: str,
    before: Entry,
    at: Entry,
    a: float | int,
    b: float | int,
    *,
    p: float | None = None,
    confirmed: bool = True,
) -> Change:
    runs = (before.launches[0], at.launches[0])
    configs = [effective_config(run) for run in runs]
    fields: tuple[ConfigChange, ...] = ()
    if all(config.fields for config in configs):
        sizes = [run.manifest.sizes for run in runs]
        diff = diff_configs(configs[0], configs[1], sizes[0], sizes[1])
        fields = (*diff.changed, *diff.unknown)
    return Change(
        metric=metric,
        before=before,
        at=at,
        a=a,
        b=b,
        p=p,
        confirmed=confirmed,
        fields=fields,
        environment=environment_differences([runs[0]], [runs[1]]),
    )
