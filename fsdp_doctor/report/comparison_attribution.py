"""Which field did it, and how that is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_doctor.attribution.moved_peak import MovedPeak
from fsdp_doctor.attribution.out_of_memory import METRIC as OOM
from fsdp_doctor.model.comparison import Attribution, Comparison, Metric
from fsdp_doctor.report.comparison_ranks import MOST_RANKS
from fsdp_doctor.report.comparison_what_if import Group, evidence_sections, group_title, share_table
from fsdp_doctor.report.document import Block, Cell, Column, Footnotes, Prose, Section, Table
from fsdp_doctor.report.words import UNKNOWN, format_value, level_text, words
from fsdp_doctor.units import format_bytes


def attribution_sections(
    comparison: Comparison, notes: Footnotes, moved: MovedPeak | None = None
) -> list[Section]:
    """Return a table per metric, those over the whole run first; what no field explains is always
    the last row.

    Of a failing moment, and of a peak that ``moved``, the phase that tells why comes with them.
    """
    groups: dict[Group, list[Attribution]] = {}
    for part in comparison.attribution:
        groups.setdefault((part.metric, part.rank, part.phase), []).append(part)
    whole = {(m.name, m.rank, m.phase): m for m in comparison.metrics if m.category is None}
    listed = _most_changed(groups, whole)
    tables = {
        key: _attribution_table(
            group_title(key), groups[key], whole.get(key), notes, _caveat(key, moved)
        )
        for key in listed
    }
    leading = [key for key in tables if _leads(key, comparison, moved, whole)]
    told: dict[Group, Table] = {}
    if comparison.what_if is not None:
        told = {
            key: table for key in leading if (table := share_table(comparison, key)) is not None
        }
    main: list[Block] = [
        told.get(key, tables[key]) for key in sorted(leading, key=lambda key: key[0] != OOM)
    ]
    rest: list[Block] = [
        table for key, table in tables.items() if key not in leading or key in told
    ]
    if not main:
        main = [Prose(text="No difference over the whole run to attribute.", tone="muted")]
    sections = [Section(title="Which field did it", blocks=tuple(main))]
    sections += evidence_sections(comparison)
    if rest:
        title = "Which field did it, by phase and rank"
        if left := len(groups) - len(listed):
            rest.append(Prose(text=f"{left:,} tables of other ranks are left out.", tone="muted"))
        sections.append(Section(title=title, blocks=tuple(rest), collapsed=True, only="wide"))
    return sections


def _most_changed(
    groups: Mapping[Group, Sequence[Attribution]], whole: Mapping[Group, Metric]
) -> list[Group]:
    """Return the groups in their order, of many ranks those that changed most."""
    of_ranks: dict[tuple[str, str | None], list[Group]] = {}
    for name, rank, phase in groups:
        if rank is not None:
            of_ranks.setdefault((name, phase), []).append((name, rank, phase))
    left: set[Group] = set()
    for keys in of_ranks.values():
        change = {key: abs(whole[key].delta or 0) if key in whole else 0 for key in keys}
        left |= set(sorted(keys, key=lambda key: -change[key])[MOST_RANKS:])
    return [key for key in groups if key not in left]


def _leads(
    key: Group, comparison: Comparison, moved: MovedPeak | None, metrics: Mapping[Group, Metric]
) -> bool:
    name, rank, phase = key
    if name == OOM or (rank, phase) == (None, None):
        return True
    whole = metrics.get((name, rank, None))
    if moved is None or whole is None or rank is not None:
        return False
    telling = moved.telling(whole, comparison.metrics)
    return telling is not None and telling.phase == phase


def _caveat(key: Group, moved: MovedPeak | None) -> str:
    name, _, phase = key
    if moved is None or phase is not None or not name.startswith("peak"):
        return ""
    return f"T{moved.text[1:]}: these bytes are of two phases."


def _attribution_table(
    title: str,
    parts: Sequence[Attribution],
    metric: Metric | None,
    notes: Footnotes,
    caveat: str,
) -> Table:
    explained = sorted((p for p in parts if p.keys), key=lambda p: (-abs(p.value), p.keys))
    rest = [p for p in parts if not p.keys]
    rows = [_attribution_row(part, notes) for part in (*explained, *rest)]
    if not rest:
        rows.append(_remainder(explained, metric))
    caption = ""
    if metric is not None:
        caption = (
            f"{format_value(metric.a, metric.unit)} -> {format_value(metric.b, metric.unit)}, "
            f"change {format_value(metric.delta, metric.unit, signed=True)}."
        )
    return Table(
        title=title,
        columns=(
            Column("category"),
            Column("field", "code"),
            Column("bytes", "number"),
            Column("share", "number"),
            Column("predicted", "number"),
            Column("level"),
            Column("evidence", only="wide"),
            Column("rests on", only="wide"),
        ),
        rows=tuple(rows),
        caption=" ".join(part for part in (caption, caveat) if part),
    )


def _remainder(explained: Sequence[Attribution], metric: Metric | None) -> tuple[Cell, ...]:
    """Return the row of what no attribution covers, so that it is never left out."""
    known = metric is not None and metric.delta is not None
    left = int(metric.delta or 0) - sum(p.value for p in explained) if metric and known else None
    blank = Cell(UNKNOWN, "muted")
    return (
        blank,
        Cell("unexplained", "warn" if left else "muted"),
        Cell(format_bytes(left, signed=True), "warn" if left else "muted"),
        blank,
        blank,
        blank,
        Cell(""),
        Cell(""),
    )


def _attribution_row(part: Attribution, notes: Footnotes) -> tuple[Cell, ...]:
    who = " + ".join(part.keys) + (" (together)" if len(part.keys) > 1 else "")
    mark = (notes.add(part.evidence),) if part.evidence and not part.keys else ()
    return (
        Cell(words(part.category) if part.category else UNKNOWN, color=part.category),
        Cell(who) if part.keys else Cell("unexplained", "warn", mark),
        Cell(format_bytes(part.value, signed=True), "strong" if part.keys else "warn"),
        Cell(f"{part.share * 100:.1f} %" if part.share is not None else UNKNOWN),
        Cell(format_bytes(part.predicted, signed=True)),
        Cell(level_text(part.level)),
        Cell(part.evidence),
        Cell("; ".join(part.rests_on)),
    )
