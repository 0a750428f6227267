"""The metrics of single ranks: how many got worse, and which rank most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from fsdp_doctor.model.comparison import Metric, Verdict
from fsdp_doctor.report.document import Block, Cell, Column, Prose, Section, Table
from fsdp_doctor.report.words import (
    UNKNOWN,
    VERDICT_TONES,
    format_value,
    metric_label,
    plural,
)
from fsdp_doctor.units import format_relative

MOST_RANKS = 16
"""Ranks of a metric that are listed; of more, those that got worse most."""
_ORDER: tuple[Verdict, ...] = ("worse", "better", "unclear", "same")
Key = tuple[str, str | None, str | None]


def rank_sections(
    metrics: Sequence[Metric], table: Callable[[Sequence[Metric]], Table]
) -> list[Section]:
    """Return a summary over the ranks, and where there is room the ranks themselves.

    ``metrics``: those of single ranks; ``table`` draws metrics one by one.
    """
    groups: dict[Key, list[Metric]] = {}
    for metric in metrics:
        groups.setdefault((metric.name, metric.phase, metric.category), []).append(metric)
    if not groups:
        return []
    sections = []
    told = {key: rows for key, rows in groups.items() if _is_summed_up(key)}
    if any(len(rows) > 1 for rows in told.values()):
        sections.append(_summary(list(told.values())))
    moved = [[row for row in rows if row.verdict != "same"] for rows in groups.values()]
    worst = [row for rows in moved for row in _worst(rows)[:MOST_RANKS]]
    left = sum(map(len, moved)) - len(worst)
    blocks: list[Block] = [table(worst)] if worst else []
    if left:
        text = f"The {MOST_RANKS} ranks of each metric that got worse most; {left:,} rows are left."
        blocks.append(Prose(text=text, tone="muted"))
    if quiet := len(metrics) - sum(map(len, moved)):
        verb = "is" if quiet == 1 else "are"
        blocks.append(Prose(text=f"{plural(quiet, 'metric')} {verb} the same.", tone="muted"))
    title = "Metrics of single ranks"
    rest = Section(title=title, blocks=tuple(blocks), level=2, collapsed=True, only="wide")
    return [*sections, rest]


def _is_summed_up(key: Key) -> bool:
    name, phase, category = key
    return category is None and (phase is None or name == "phase_time_s")


def _summary(groups: Sequence[Sequence[Metric]]) -> Section:
    told = [rows for rows in groups if any(row.verdict != "same" for row in rows)]
    blocks: list[Block] = []
    if told:
        columns = (
            Column("metric"),
            Column("ranks"),
            Column("worst", "number"),
            Column("A", "number"),
            Column("B", "number"),
            Column("change", "number"),
        )
        blocks.append(Table(columns=columns, rows=tuple(map(_row, told))))
    if quiet := len(groups) - len(told):
        verb = "is" if quiet == 1 else "are"
        text = f"{plural(quiet, 'metric')} {verb} the same on every rank."
        blocks.append(Prose(text=text, tone="muted"))
    return Section(title="Metrics by rank", blocks=tuple(blocks), level=2)


def _row(rows: Sequence[Metric]) -> tuple[Cell, ...]:
    """Return a metric's row: how many ranks have which verdict, and the rank that is worst."""
    counts = Counter(row.verdict for row in rows)
    verdicts = ", ".join(f"{counts[v]} {v}" for v in _ORDER if counts[v])
    worst = _worst(rows)[0]
    tone = VERDICT_TONES[worst.verdict]
    label = metric_label(worst).removesuffix(f", rank {worst.rank}")
    return (
        Cell(label),
        Cell(verdicts),
        Cell(str(worst.rank), "strong"),
        Cell(format_value(worst.a, worst.unit)),
        Cell(format_value(worst.b, worst.unit)),
        Cell(UNKNOWN if worst.relative is None else format_relative(worst.relative), tone),
    )


def _worst(rows: Sequence[Metric]) -> list[Metric]:
    """Order ranks: firm verdicts before others, then what got worse most."""

    def badness(row: Metric) -> tuple[int, float, int]:
        change = row.delta or 0.0
        if row.better == "higher":
            change = -change
        return ("worse", "unclear", "same", "better").index(row.verdict), -change, row.rank or 0

    return sorted(rows, key=badness)
