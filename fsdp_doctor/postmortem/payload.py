"""The post-mortem as the JSON contract has it; see ``docs/oom.md``."""

from __future__ import annotations

from typing import Any

from msgspec import to_builtins

from fsdp_doctor.logs.history import RankHistory
from fsdp_doctor.logs.records import Failure
from fsdp_doctor.model.snapshot import SnapshotAnalysis
from fsdp_doctor.postmortem.examine import PostMortem
from fsdp_doctor.redact import redact, redact_text

_CONTRACT = (
    "kind",
    "fatal",
    "rank",
    "local_rank",
    "host",
    "pid",
    "device",
    "time",
    "iteration",
    "phase",
    "backend",
    "form",
    "requested_bytes",
    "total_bytes",
    "free_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "reserved_unallocated_bytes",
    "process_bytes",
    "other_processes_bytes",
)
_MORE = (
    "private_pool_bytes",
    "limit_bytes",
    "victim_of",
    "exit_code",
    "moment",
    "fragmentation",
    "repeats",
)
MAX_POINTS = 2000
"""Points of a rank's history in JSON; more are thinned out."""


def postmortem_payload(result: PostMortem) -> dict[str, Any]:
    """Return the keys of ``oom --json`` below the envelope."""
    found = result.triage
    history = result.logs.history
    return {
        "failures": [failure_payload(failure) for failure in found.failures],
        "first_failure": found.first,
        "findings": result.findings,
        "verdict": result.verdict,
        "scope": {
            "ranks_failed": found.ranks_failed,
            "ranks_seen": found.ranks_seen,
            "which": found.scope,
        },
        "history": {
            "lines": history.lines,
            "formats": history.formats,
            "total_steps": history.total_steps,
            "growth": result.facts.growth,
            "ranks": [
                _rank(rank, one)
                for rank, one in sorted(
                    history.ranks.items(), key=lambda item: (item[0] is None, item[0] or 0)
                )
                if one.lines
            ],
        },
        "snapshot": redact(to_builtins(result.snapshot)),
        "snapshots": [_brief(found) for found in result.snapshots],
        "logs": {
            "files": result.logs.files,
            "bytes": result.logs.bytes,
            "lines": result.logs.lines,
        },
    }


def _brief(found: SnapshotAnalysis) -> dict[str, Any]:
    """Return what tells one rank's snapshot from another's."""
    return {
        "path": redact_text(found.path),
        "rank": found.rank,
        "peak_allocated_bytes": found.peak.allocated_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "refused_bytes": found.oom.requested_bytes if found.oom else None,
        "phase": found.focus.phase,
        "categories": found.focus.categories,
    }


def failure_payload(failure: Failure) -> dict[str, Any]:
    """Return one failure."""
    values: dict[str, Any] = {name: getattr(failure, name) for name in (*_CONTRACT, *_MORE)}
    values["processes"] = [{"pid": pid, "bytes": size} for pid, size in failure.processes]
    values["frames"] = [redact_text(frame) for frame in failure.frames]
    values["message"] = redact_text(failure.text)
    values["source"] = {"file": redact_text(failure.file), "line": failure.line or None}
    return values


def _rank(rank: int | None, one: RankHistory) -> dict[str, Any]:
    return {
        "rank": rank,
        "step_times": _thinned(list(zip(one.time_steps, one.times_s, strict=True))),
        "memory": _thinned(
            list(zip(one.memory_steps, one.allocated, one.peak, one.reserved, strict=True))
        ),
        "lines": one.lines,
    }


def _thinned(rows: list[tuple[Any, ...]]) -> list[list[Any]]:
    every = max(1, -(-len(rows) // MAX_POINTS))
    kept = rows[::every]
    if rows and kept[-1] is not rows[-1]:
        kept.append(rows[-1])
    return [[_plain(index, value) for index, value in enumerate(row)] for row in kept]


def _plain(index: int, value: float) -> float | int | None:
    if value != value or value in (float("inf"), float("-inf")):  # noqa: PLR0124 (NaN)
        return None
    return int(value) if index == 0 or value > 1e5 else value
