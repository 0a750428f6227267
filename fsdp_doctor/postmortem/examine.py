"""Logs and, perhaps, a config in; failures, history and findings out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_doctor.config.load import load_config
from fsdp_doctor.errors import InputError
from fsdp_doctor.logs.scan import ScannedLogs, scan_logs
from fsdp_doctor.logs.sources import find_logs
from fsdp_doctor.model.finding import Finding
from fsdp_doctor.postmortem.diagnose import diagnose, verdict
from fsdp_doctor.postmortem.facts import Facts, collect
from fsdp_doctor.postmortem.triage import Triage, triage

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


def examine(paths: Sequence[Path], config: Path | None = None) -> PostMortem:
    """Read the logs (files, directories, ``-``) and say what happened.

    Raises InputError when the logs or the config cannot be read.
    """
    files, skipped = find_logs(paths)
    settings, config_warnings = config_settings(config) if config else ({}, [])
    logs = scan_logs(files)
    found = triage(logs)
    facts = collect(logs, found, settings)
    findings = diagnose(facts, found)
    failed = found.primary is not None or logs.tracebacks
    warnings = [*logs.warnings, *config_warnings]
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
    )


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
