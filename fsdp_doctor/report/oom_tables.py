"""Tables of a post-mortem: the numbers of a failure, all failures, the history of the job."""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import median

from fsdp_doctor.logs.history import History, RankHistory
from fsdp_doctor.logs.records import Failure
from fsdp_doctor.postmortem import PostMortem
from fsdp_doctor.report.document import Cell, Column, Facts, Table
from fsdp_doctor.report.oom_answer import kind_text
from fsdp_doctor.report.oom_clean import Cleaner
from fsdp_doctor.report.words import UNKNOWN, optional
from fsdp_doctor.units import format_bytes, format_seconds

MAX_ROWS = 24
_SIZES = (
    ("asked for", "requested_bytes"),
    ("device", "total_bytes"),
    ("free on the device", "free_bytes"),
    ("allocated", "allocated_bytes"),
    ("in private pools (part of allocated)", "private_pool_bytes"),
    ("idle in the pool", "reserved_unallocated_bytes"),
    ("reserved (pool)", "reserved_bytes"),
    ("this process", "process_bytes"),
    ("other processes", "other_processes_bytes"),
    ("allowed to this process", "limit_bytes"),
)


def numbers_facts(failure: Failure, cleaner: Cleaner) -> Facts:
    """Return what is known of one failure."""
    items = [
        ("kind", Cell(f"{failure.kind} ({kind_text(failure)})")),
        ("place", Cell(cleaner.place(failure.file, failure.line or None))),
        ("time", Cell(_time(failure.time))),
        ("wording", Cell(f"{failure.form} {failure.backend or ''}".strip())),
    ]
    for label, name in _SIZES:
        value = getattr(failure, name)
        if value is not None:
            items.append((label, Cell(f"{format_bytes(value)} ({value:,} bytes)")))
    if failure.processes:
        listed = ", ".join(f"{pid}: {format_bytes(size)}" for pid, size in failure.processes[:8])
        more = f" and {len(failure.processes) - 8} more" if len(failure.processes) > 8 else ""
        items.append(("listed processes", Cell(listed + more)))
    if failure.fragmentation != "unknown":
        items.append(("fragmentation", Cell(failure.fragmentation)))
    items.append(("message", Cell(cleaner.text(failure.text))))
    return Facts(items=tuple(items))


def failures_table(result: PostMortem, cleaner: Cleaner) -> Table:
    """Return all failures, one a row."""
    failures = result.triage.failures
    rows = []
    for index, failure in enumerate(failures[:MAX_ROWS]):
        first = index == result.triage.first
        role = "first" if first else "victim" if failure.victim_of is not None else ""
        rows.append(
            (
                Cell(optional(failure.rank)),
                Cell(cleaner.host(failure.host) or UNKNOWN),
                Cell(failure.kind, "bad" if first else "plain"),
                Cell(role or ("recovered" if not failure.fatal else "own")),
                Cell(failure.phase.replace("_", " ")),
                Cell(format_bytes(failure.requested_bytes)),
                Cell(_time(failure.time)),
                Cell(cleaner.place(failure.file, failure.line or None)),
            )
        )
    hidden = len(failures) - len(rows)
    return Table(
        caption=f"{hidden} more are in the JSON." if hidden > 0 else "",
        columns=(
            Column("rank", "number"),
            Column("host", only="wide"),
            Column("kind", "code"),
            Column("role"),
            Column("phase"),
            Column("asked for", "number"),
            Column("time", only="wide"),
            Column("place", "path"),
        ),
        rows=tuple(rows),
    )


def history_table(history: History) -> Table:
    """Return the history of each rank in a row."""
    told = [item for item in history.ranks.items() if item[1].lines]
    ranks = sorted(told, key=lambda item: (item[0] is None, item[0] or 0))
    rows = [_rank_row(rank, one) for rank, one in ranks[:MAX_ROWS]]
    hidden = len(ranks) - len(rows)
    known = ", ".join(f"{count:,} of {name}" for name, count in sorted(history.formats.items()))
    more = f" {hidden} more ranks are in the JSON." if hidden > 0 else ""
    return Table(
        caption=f"Lines: {known}.{more}",
        columns=(
            Column("rank", "number"),
            Column("lines", "number"),
            Column("last step", "number"),
            Column("step time", "number"),
            Column("allocated", "number"),
            Column("peak", "number"),
            Column("reserved", "number"),
        ),
        rows=tuple(rows),
    )


def _rank_row(rank: int | None, one: RankHistory) -> tuple[Cell, ...]:
    times = [value for value in one.times_s if value == value]  # noqa: PLR0124 (NaN)
    return (
        Cell(optional(rank)),
        Cell(f"{one.lines:,}"),
        Cell(optional(one.last_step)),
        Cell(format_seconds(median(times)) if times else UNKNOWN),
        *(Cell(_last(column)) for column in (one.allocated, one.peak, one.reserved)),
    )


def _last(column: object) -> str:
    values = [value for value in column if value == value]  # type: ignore[attr-defined]  # noqa: PLR0124
    return format_bytes(values[-1]) if values else UNKNOWN


def _time(moment: float | None) -> str:
    if moment is None or not 0 < moment < 4e10:
        return UNKNOWN
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S")
