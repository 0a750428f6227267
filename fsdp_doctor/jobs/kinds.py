"""What a path holds: a run, a spec or the log of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from fsdp_doctor.config.load import split_paths
from fsdp_doctor.jobs.dump import is_dump
from fsdp_doctor.jobs.heads import head_of
from fsdp_doctor.logs.progress import FAMILIES
from fsdp_doctor.runs.reader import is_run_directory

Kind = Literal["run", "spec", "log"]

_SPEC_NAMES = frozenset({".yaml", ".yml"})
_LOG_NAMES = frozenset({".log", ".out", ".err", ".txt", ".gz", ".stdout", ".stderr"})


def kind_of(path: Path) -> Kind:
    """Return what ``path`` looks like; a path that does not exist is a run's.

    A directory without a run below it that holds logs is one job, a file a log when its name or
    its lines say so, else a spec.
    """
    first = split_paths(path)[0]
    if first.is_dir():
        return "log" if _holds_logs(first) else "run"
    if not first.is_file():
        return "run"
    suffix = first.suffix.lower()
    if suffix in _SPEC_NAMES:
        return "spec"
    if suffix in _LOG_NAMES:
        return "log"
    return "log" if _has_log_lines(first) else "spec"


def _holds_logs(directory: Path) -> bool:
    if is_run_directory(directory) or any(map(is_run_directory, _children(directory))):
        return False
    return any(
        file.suffix.lower() in _LOG_NAMES
        for place in (directory, *_children(directory))
        for file in place.iterdir()
        if file.is_file()
    )


def _children(directory: Path) -> list[Path]:
    return [child for child in directory.iterdir() if child.is_dir() and not child.is_symlink()]


def _has_log_lines(path: Path) -> bool:
    text = head_of(path)
    data = text.encode()
    return is_dump(text) or any(
        next(family.matches(data), None) is not None for family in FAMILIES if family.marker in data
    )
