"""Logs, snapshots, a run, perhaps a config in; failures, history and findings out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_doctor.config.load import load_config
from fsdp_doctor.errors import InputError
from fsdp_doctor.logs.scan import ScannedLogs, scan_logs
from fsdp_doctor.logs.sources import LogFile, find_logs
from fsdp_doctor.memory.snapshot_files import SUFFIXES, is_snapshot, is_step_folder
from fsdp_doctor.model.finding import Finding
from fsdp_doctor.model.snapshot import SnapshotAnalysis
from fsdp_doctor.postmortem.diagnose import diagnose, verdict
from fsdp_doctor.postmortem.facts import Facts, collect
from fsdp_doctor.postmortem.runs import (
    add_run,
    read_runs,
    run_details,
    run_facts,
    run_settings,
)
from fsdp_doctor.postmortem.snapshots import join_failures, of_failure, read_snapshots
from fsdp_doctor.postmortem.triage import Triage, triage
from fsdp_doctor.runs.reader import is_run_directory

MAX_FOLDERS = 32
"""Folders of snapshots that are looked into beside logs."""
_PAIR = re.compile(
    r"^\s*(?:export +|--|- )?([A-Za-z][\w.\-]{1,80})\s*[:= ]\s*[\"']?([^\"'#\n]{1,200})"
)


@dataclass(slots=True, kw_only=True)
class PostMortem:
    """All that is said about a job that died."""

    logs: ScannedLogs
    triage: Triage
    facts: Facts
    findings: list[Finding]
    verdict: dict[str, Any]
    """``enough``, ``text``, ``decide``."""
    warnings: list[str] = field(default_factory=list)
    config_name: str | None = None
    runs: int = 0
    """Run directories read."""
    snapshots: list[SnapshotAnalysis] = field(default_factory=list)
    snapshot: SnapshotAnalysis | None = None
    """The one that tells of the first failure."""


def examine(
    paths: Sequence[Path], config: Path | None = None, snapshots: Sequence[Path] = ()
) -> PostMortem:
    """Read logs, memory snapshots and run directories and say what happened.

    ``paths`` are files, directories or ``-``; snapshots and run directories among them are taken
    as such, and so are snapshots in a directory of logs. ``snapshots`` must be snapshots.

    Raises InputError when the logs, a snapshot or the config cannot be read, and when there is not
    a byte in the logs and nothing else to go by.
    """
    runs = read_runs(paths)
    if runs:
        paths = [path for path in paths if not (path.is_dir() and is_run_directory(path))]
    given = [path for path in paths if _is_snapshot_file(path)]
    files, skipped, inside = _logs(paths, [*given, *snapshots], needed=not runs)
    settings, config_warnings = config_settings(config) if config else ({}, [])
    logs = scan_logs(files) if files else ScannedLogs()
    own = {id(failure): run for run in runs if (failure := add_run(logs, run)) is not None}
    limit = next((f.limit_bytes for f in logs.failures if f.limit_bytes is not None), None)
    shown = read_snapshots([*given, *snapshots], limit) + _inside(inside, limit)
    if not (logs.bytes or logs.warnings or shown or runs):
        raise InputError(
            "the logs are empty",
            where=", ".join(map(str, paths[:3])),
            hint="give the log that holds the job's standard error, or a snapshot of the failure",
        )
    if files and not logs.bytes and not logs.warnings:
        logs.warnings.append("the logs are empty")
    join_failures(logs.failures, shown)
    found = triage(logs)
    snapshot = of_failure(shown, found.primary) if shown else None
    run = own.get(id(found.primary), runs[0] if runs else None)
    settings = (run_settings(run) if run is not None else {}) | settings
    facts = collect(logs, found, settings, snapshot)
    if run is not None and snapshot is None and id(found.primary) in own:
        facts.values |= run_facts(run)
        facts.details = run_details(run)
    findings = diagnose(facts, found)
    failed = found.primary is not None or logs.tracebacks
    warnings = [*logs.warnings, *config_warnings, *(snapshot.warnings if snapshot else ())]
    if skipped:
        names = ", ".join(Path(name).name for name in skipped[:3])
        warnings.append(f"{len(skipped)} files are no logs and were left out ({names} ...)")
    if logs.left_out:
        warnings.append(f"{logs.left_out} further failures were only counted")
    return PostMortem(
        logs=logs,
        triage=found,
        facts=facts,
        findings=findings,
        verdict=verdict(findings, facts.values, failed=failed),
        warnings=warnings,
        config_name=str(config) if config else None,
        runs=len(runs),
        snapshots=shown,
        snapshot=snapshot,
    )


def _is_snapshot_file(path: Path) -> bool:
    """Whether a path is a snapshot by its name, or a pickle by its first bytes (not gzip: that is
    what logs are packed with).
    """
    if str(path) == "-" or not path.is_file():
        return False
    if path.name.lower().endswith(SUFFIXES):
        return True
    with path.open("rb") as file:
        head = file.read(2)
    return head[:1] == b"\x80" and head[1:] in (b"\x02", b"\x03", b"\x04", b"\x05")


def _logs(
    paths: Sequence[Path], snapshots: Sequence[Path], *, needed: bool
) -> tuple[list[LogFile], list[str], list[Path]]:
    """Return the logs, what was left out, and the folders that hold snapshots beside them."""
    given = {path.absolute() for path in snapshots}
    others = [path for path in paths if path.absolute() not in given]
    inside = [path for path in others if path.is_dir() and is_snapshot(path)]
    if not others:
        if needed and not snapshots:
            raise InputError("nothing to read", hint="give logs, a snapshot, or both")
        return [], [], []
    try:
        files, skipped = find_logs(others)
    except InputError:
        if not inside and needed:
            raise
        files, skipped = [], []
    left = [name for name in skipped if not name.lower().endswith(SUFFIXES)]
    deeper = _folders([Path(name) for name in skipped if name.lower().endswith(SUFFIXES)])
    inside += [folder for folder in deeper if folder not in inside]
    return files, left, inside


def _folders(pickles: Sequence[Path]) -> list[Path]:
    """The folders that hold these files; of ``step_...`` folders the one around them."""
    parents = dict.fromkeys(path.parent for path in pickles)
    around = dict.fromkeys(
        parent.parent if is_step_folder(parent) else parent for parent in parents
    )
    return [folder for folder in list(around)[:MAX_FOLDERS] if is_snapshot(folder)]


def _inside(folders: Sequence[Path], limit_bytes: int | None) -> list[SnapshotAnalysis]:
    """Snapshots that lie beside logs: one that cannot be read is no reason to give up."""
    found: list[SnapshotAnalysis] = []
    for folder in folders:
        with suppress(InputError):
            found += read_snapshots([folder], limit_bytes)
    return found


def config_settings(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what a config sets: effective and native keys with their values.

    A file of no known format is read as lines of keys and values.
    """
    if not path.exists():
        raise InputError("no such file", where=str(path))
    try:
        loaded = load_config(path)
    except InputError as error:
        text = path.read_text(encoding="utf-8", errors="replace")[: 1 << 20]
        pairs = {m[1]: m[2].strip() for line in text.splitlines() if (m := _PAIR.match(line))}
        if not pairs:
            raise
        return pairs, [f"{path}: read as plain keys and values ({error})"]
    settings: dict[str, Any] = {}
    if loaded.native is not None:
        settings = {key: one.value for key, one in loaded.native.fields.items()}
        settings |= loaded.native.environment
    settings |= {
        key: one.value for key, one in loaded.config.fields.items() if one.set and one.effective
    }
    return settings, []
