"""Evidence under names: what rules look at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_doctor.logs.history import Growth, growths
from fsdp_doctor.logs.prefix import split_prefix
from fsdp_doctor.logs.records import Failure, Note
from fsdp_doctor.logs.scan import ScannedLogs
from fsdp_doctor.model.finding import Evidence
from fsdp_doctor.model.snapshot import SnapshotAnalysis
from fsdp_doctor.postmortem.snapshot_facts import snapshot_details, snapshot_facts
from fsdp_doctor.postmortem.triage import Triage

_RETRIED = "during handling of the above exception"
_TOP_FRAMES = 8
_OFF = frozenset({"none", "null", "false", "no", "off", "0", "~"})
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)(?::|$)")
"""The last line of a traceback, behind its prefixes."""
_NOTE_FACTS = {
    "flushes": "cache_flushes",
    "host_percent": "host_memory",
    "mixed_grad": "mixed_grad_unit",
    "unused_flag": "unused_flag",
}
"""Facts that come from notes."""


@dataclass(slots=True)
class Facts:
    """Values by name, as ``config.rules.evaluate.Names`` wants them; None is not known."""

    values: dict[str, Any]
    growth: Growth | None = None
    config_keys: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Note] = field(default_factory=dict)
    """Last note of each name."""
    snapshot: SnapshotAnalysis | None = None
    """Where the facts about what fills the device come from."""
    details: dict[str, tuple[Evidence, ...]] = field(default_factory=dict)
    """Cause -> what in the snapshot its evidence rests on."""

    def note_for(self, condition: str) -> Note | None:
        """Return the line a condition over notes rests on."""
        for fact, name in _NOTE_FACTS.items():
            if condition.startswith(fact):
                return self.notes.get(name)
        return None

    def value(self, name: str) -> Any:
        """Return a fact."""
        return self.values.get(name)

    def is_written(self, name: str) -> bool:
        """Return whether a fact is known."""
        return self.values.get(name) is not None

    def has_key(self, pattern: str) -> bool:
        """Return whether a key of the config matches."""
        return any(re.search(pattern, key) for key in self.config_keys)

    def in_range(self, package: str, versions: str) -> bool:  # noqa: ARG002
        """Versions are not known from logs."""
        return False


def collect(
    logs: ScannedLogs,
    found: Triage,
    config: Mapping[str, Any],
    snapshot: SnapshotAnalysis | None = None,
) -> Facts:
    """Return the evidence: first failure, the job's history, its config, a memory snapshot."""
    failure = found.primary
    growth = next(growths(logs.history), None)
    values: dict[str, Any] = {
        "failures": len(found.failures),
        "scope": found.scope,
        "recovered": found.recovered,
        "history_lines": logs.history.lines,
        "growth": growth is not None,
        "growth_counter": growth.counter if growth else None,
        "tracebacks": logs.tracebacks,
        "config": _config_text(config),
        "switched_on": _config_text({key: v for key, v in config.items() if not _off(v)}),
        **_notes(logs),
        **_peak_over_resident(logs),
    }
    if failure is not None:
        values |= _of_failure(failure) | _numbers(failure)
        values["same_device"] = _same_device(found, failure)
    if failure is None and logs.tracebacks:
        values |= _cut_traceback(logs)
    facts = Facts(values, growth, dict(config), {note.name: note for note in logs.notes})
    if snapshot is not None:
        add_snapshot(facts, snapshot)
    return facts


def add_snapshot(facts: Facts, snapshot: SnapshotAnalysis) -> None:
    """Add what a snapshot shows; where no failure is known its moment of interest stands for it."""
    values = facts.values
    total, free = values.get("total"), values.get("free")
    own = None
    if total and free is not None and not values.get("limited"):
        own = min((snapshot.focus.reserved_bytes + free) / total, 1.0)
    shown = snapshot_facts(snapshot, own)
    if values.get("phase") is None:
        values["phase"] = str(snapshot.focus.phase)
    if values.get("expandable") is None and "expandable_segments:true" in values.get("config", ""):
        shown["expandable"] = True
    facts.values = values | shown
    facts.snapshot = snapshot
    facts.details = snapshot_details(snapshot)


def _config_text(config: Mapping[str, Any]) -> str:
    return "\n".join(f"{key}={value}" for key, value in config.items()).lower()


def _off(value: Any) -> bool:
    """Whether a setting is written as not in use."""
    return value in (None, False, "", 0) or str(value).strip().lower() in _OFF


def _notes(logs: ScannedLogs) -> dict[str, Any]:
    flushes = [note.values["count"] for note in logs.notes if note.name == "cache_flushes"]
    host = [note.values["percent"] for note in logs.notes if note.name == "host_memory"]
    mixed = [note for note in logs.notes if note.name == "mixed_grad_unit"]
    return {
        "flushes": max(flushes, default=None),
        "flush_lines": len(flushes),
        "host_percent": host[-1] if host else None,
        "mixed_grad": bool(mixed),
        "unused_flag": any(note.name == "unused_flag" for note in logs.notes),
    }


def _peak_over_resident(logs: ScannedLogs) -> dict[str, Any]:
    ratios = [
        peak / resident
        for one in logs.history.ranks.values()
        for peak, resident in zip(one.peak[-1:], one.allocated[-1:], strict=True)
        if resident > 0
    ]
    return {"peak_over_resident": max(ratios, default=None)}


def _of_failure(failure: Failure) -> dict[str, Any]:
    frames = "\n".join(failure.frames).lower()
    top = "\n".join(failure.frames[:_TOP_FRAMES]).lower()
    around = failure.context
    return {
        "kind": failure.kind,
        "form": failure.form,
        "fatal": failure.fatal,
        "victim": failure.victim,
        "phase": failure.phase,
        "moment": failure.moment,
        "backend": failure.backend,
        "iteration": failure.iteration,
        "exit_code": failure.exit_code,
        "frames": frames,
        "has_frames": bool(frames),
        "top": top or _source_lines(around),
        "around": around,
        "text": failure.text.lower(),
        "retried": _RETRIED in around and "out of memory" in around,
        "fragmentation": failure.fragmentation,
    }


def _source_lines(around: str) -> str:
    """Return lines of code of a cut traceback."""
    kept = [line for line in around.split("\n") if line.startswith(("    ", "\t"))]
    return "\n".join(kept[-4:])


def _cut_traceback(logs: ScannedLogs) -> dict[str, Any]:
    """A traceback whose last line is missing still shows where training was."""
    from fsdp_doctor.logs.frames import frames_in, phase_of

    lines = logs.tail.splitlines()
    last = max(
        (n for n, line in enumerate(lines) if 'File "' in line and ", line " in line), default=0
    )
    if any(_RAISED.match(split_prefix(line)[1]) for line in lines[last:]):
        return {"kind": "other_error"}
    frames = frames_in(lines)
    text = "\n".join(frames)
    return {
        "kind": "cut",
        "frames": text.lower(),
        "top": "\n".join(frames[:_TOP_FRAMES]).lower(),
        "has_frames": bool(frames),
        "phase": str(phase_of(text)),
        "moment": "unknown",
    }


def _numbers(failure: Failure) -> dict[str, Any]:
    total, free, request = failure.total_bytes, failure.free_bytes, failure.requested_bytes
    device = failure.kind == "device_oom"
    own = failure.process_bytes
    if own is None and device:
        own = _hidden_own(failure)
    others = None
    if device and own is not None and total is not None and free is not None:
        others = max(total - free - own, 0)
    reserved = failure.reserved_bytes
    outside = own - reserved if own is not None and reserved is not None and device else None
    unseen = None
    if device and own is None and None not in (total, free, reserved):
        unseen = (total or 0) - (free or 0) - (reserved or 0)
    values: dict[str, Any] = {
        "requested": request,
        "total": total,
        "free": free,
        "allocated": failure.allocated_bytes,
        "reserved": reserved,
        "idle": failure.reserved_unallocated_bytes,
        "others": others,
        "outside": outside,
        "unseen": unseen,
        "limit": failure.limit_bytes,
        "private": failure.private_pool_bytes,
        "foreign": len(_foreign(failure, own)) if device else None,
    }
    limit = failure.limit_bytes
    room = min(total, limit) if total and limit else total
    for name in ("allocated", "idle", "private", "requested"):
        values[f"{name}_share"] = _share(values[name], room)
    for name in ("others", "outside", "unseen"):
        values[f"{name}_share"] = _share(values[name], total)
    values["limited"] = bool(limit and request and free and free >= request)
    allocated = failure.allocated_bytes
    values["request_over_allocated"] = request / allocated if request and allocated else None
    return values


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def _hidden_own(failure: Failure) -> int | None:
    """In a container the own process is listed as ``Process N``: the one that fits the pool."""
    reserved = failure.reserved_bytes
    if reserved is None:
        return None
    fitting = [size for _, size in failure.processes if size >= reserved * 0.98]
    return min(fitting, default=None)


def _foreign(failure: Failure, own: int | None) -> list[tuple[int, int]]:
    listed = list(failure.processes)
    if failure.process_bytes is None and own is not None:
        listed = [entry for entry in listed if entry[1] != own]
    return listed


def _same_device(found: Triage, failure: Failure) -> int:
    """Count the ranks of one host that failed on one device index; the host must be known."""
    if failure.host is None:
        return 0
    return len(
        {
            other.rank
            for other in found.failures
            if other.kind == "device_oom" and other.device is not None
            if (other.device, other.host) == (failure.device, failure.host)
            if other.rank is not None and other.fatal
        }
    )
