"""Say which changed fields may have made B run out of memory, and how to undo them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_doctor.attribution.memory_findings import (
    CAUSES,
    TRIFLE_SHARE,
    change_text,
    rests_on,
    undo_advice,
)
from fsdp_doctor.attribution.out_of_memory import OutOfMemory
from fsdp_doctor.model.comparison import Attribution
from fsdp_doctor.model.config import ConfigChange
from fsdp_doctor.model.finding import Evidence, Finding
from fsdp_doctor.units import format_bytes


def out_of_memory_findings(
    found: OutOfMemory, changes: Sequence[ConfigChange]
) -> Iterator[Finding]:
    """Yield a finding per field, or per fields that act together, most bytes first.

    Level 0, whatever a formula says: the peak that B was on its way to is not known.
    """
    by_key = {change.key: change for change in changes}
    groups: dict[tuple[str, ...], list[Attribution]] = {}
    for row in found.rows:
        if row.keys and row.value > 0:
            groups.setdefault(row.keys, []).append(row)
    most = max((_total(rows) for rows in groups.values()), default=0)
    for keys, rows in groups.items():
        if _total(rows) >= TRIFLE_SHARE * most:
            yield _finding(found, [by_key[key] for key in keys], rows)
    if not groups:
        yield _nothing_found(found)


def _total(rows: Sequence[Attribution]) -> int:
    return sum(row.value for row in rows)


def _where(found: OutOfMemory) -> str:
    failure = found.failure
    return f"{found.name} (B) ran out of memory in {failure.phase} of step {failure.step}"


def _finding(
    found: OutOfMemory, fields: Sequence[ConfigChange], rows: Sequence[Attribution]
) -> Finding:
    names = " and ".join(change_text(change) for change in fields)
    parts = ", ".join(
        f"{format_bytes(row.value)} more in {row.category or 'allocated memory'}" for row in rows
    )
    joint = len(fields) > 1
    saves = None if joint else _total(rows)
    return Finding(
        cause=CAUSES.get(rows[0].category or "", "configuration"),
        claim=f"{_where(found)}; {names} may{' together' if joint else ''} account for {parts} "
        "than A held there",
        confidence=0.4 if joint else 0.6,
        severity="error",
        level=0,
        evidence=(_measured(found), *(_evidence(row) for row in rows)),
        rests_on=rests_on(rows),
        flags=tuple(change.key for change in fields),
        advice=tuple(advice for field in fields for advice in undo_advice(field, saves)),
    )


def _nothing_found(found: OutOfMemory) -> Finding:
    grown = [row for row in found.rows if row.value > 0]
    return Finding(
        cause="unexplained",
        claim=f"{_where(found)}; no changed field is known to raise what it held there",
        confidence=0.9,
        severity="error",
        evidence=(_measured(found), *(_evidence(row) for row in grown)),
        rests_on=("A", "B"),
    )


def _measured(found: OutOfMemory) -> Evidence:
    metric, failure = found.metric, found.failure
    request = failure.requested_bytes
    asked = "" if request is None else f", {format_bytes(request)} of them asked for in vain"
    text = f"in {failure.phase} A {format_bytes(metric.a)}, B at least {format_bytes(metric.b)}"
    return Evidence(
        text=f"{text}{asked} ({found.moments})",
        rank=metric.rank,
        step=failure.step,
        bytes=None if metric.delta is None else int(metric.delta),
    )


def _evidence(row: Attribution) -> Evidence:
    return Evidence(text=row.evidence, rank=row.rank, bytes=row.value)
