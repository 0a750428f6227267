"""The metrics of a comparison as tiles, tables and a waterfall."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fsdp_doctor.attribution.observations import VARYING
from fsdp_doctor.model.comparison import Comparison, Metric
from fsdp_doctor.model.run import Run
from fsdp_doctor.report import facts, plots
from fsdp_doctor.report.comparison_ranks import rank_sections
from fsdp_doctor.report.document import (
    Block,
    Cell,
    Column,
    Footnotes,
    PlotFigure,
    Prose,
    Section,
    Table,
    Tile,
)
from fsdp_doctor.report.words import (
    UNKNOWN,
    VERDICT_TONES,
    format_value,
    interval,
    metric_label,
    metric_name,
    plural,
)
from fsdp_doctor.units import format_relative

_GROUPS = ("by phase", "by category")
_LONG_GROUPS = ("by category in each phase",)
_BY_RANK = "by rank"
_HUGE = 1000
"""A factor beyond which only its being huge counts: A held next to nothing."""
_HEADLINES = ("peak_allocated_bytes", "peak_reserved_bytes", "step_time_s", "tokens_per_s")


def headline_tiles(comparison: Comparison) -> tuple[Tile, ...]:
    """Return the few metrics that a reader looks for first."""
    tiles = []
    for name in _HEADLINES:
        metric = _whole(comparison, name)
        if metric is not None:
            a, b = format_value(metric.a, metric.unit), format_value(metric.b, metric.unit)
            tiles.append(
                Tile(
                    label=metric_name(name),
                    value=_relative(metric),
                    detail=f"{a} -> {b}, {metric.verdict}",
                    tone=VERDICT_TONES[metric.verdict],
                )
            )
    return tuple(tiles)


def metric_sections(
    comparison: Comparison, runs_a: Sequence[Run], runs_b: Sequence[Run], notes: Footnotes
) -> list[Section]:
    """Return the metrics over all ranks, then those of phases, categories and single ranks."""
    groups: dict[str, list[Metric]] = {
        title: [] for title in ("", *_GROUPS, *_LONG_GROUPS, _BY_RANK)
    }
    for metric in comparison.metrics:
        groups[_group(metric)].append(metric)
    main, of_ranks = groups.pop(""), groups.pop(_BY_RANK)
    blocks: tuple[Block, ...] = (Prose(text="No metric is known on both sides.", tone="muted"),)
    if main:
        blocks = (_table(main, notes), *_spread_lines(main), *_legend())
    sections = [Section(title="Metrics", blocks=blocks)]
    for title, metrics in groups.items():
        if not metrics:
            continue
        inner: list[Block] = []
        if title == "by category":
            inner += _waterfall(comparison, runs_a, runs_b)
        changed = [m for m in metrics if m.verdict != "same"]
        if changed:
            inner.append(_table(changed, notes))
        quiet = len(metrics) - len(changed)
        if quiet:
            verb = "is" if quiet == 1 else "are"
            inner.append(Prose(text=f"{plural(quiet, 'metric')} {verb} the same.", tone="muted"))
        long = title in _LONG_GROUPS
        sections.append(
            Section(
                title=f"Metrics {title}",
                blocks=tuple(inner),
                level=2,
                collapsed=long,
                only="wide" if long else None,
            )
        )
    return [*sections, *rank_sections(of_ranks, lambda rows: _table(rows, notes))]


def _group(metric: Metric) -> str:
    if metric.rank is not None:
        return _BY_RANK
    if metric.category is not None:
        return "by category" if metric.phase is None else "by category in each phase"
    return "by phase" if metric.phase is not None else ""


def _whole(comparison: Comparison, name: str) -> Metric | None:
    return next((m for m in comparison.metrics if m.name == name and not _group(m)), None)


def _table(metrics: Sequence[Metric], notes: Footnotes) -> Table:
    return Table(
        columns=(
            Column("metric"),
            Column("A", "number"),
            Column("B", "number"),
            Column("change", "number"),
            Column("", "number"),
            Column("verdict"),
            Column("n", "number"),
            Column("95 % interval", "number", only="wide"),
            Column("steps", "number", only="wide"),
            Column("p", "number", only="wide"),
        ),
        rows=tuple(_row(metric, notes) for metric in metrics),
    )


def _row(metric: Metric, notes: Footnotes) -> tuple[Cell, ...]:
    tone = VERDICT_TONES[metric.verdict]
    return (
        Cell(metric_label(metric), notes=notes.add_all(metric.warnings), color=metric.category),
        Cell(format_value(metric.a, metric.unit)),
        Cell(format_value(metric.b, metric.unit)),
        Cell(format_value(metric.delta, metric.unit, signed=True), tone),
        Cell(_relative(metric), tone),
        Cell(metric.verdict, tone),
        Cell(_basis(metric)),
        Cell(interval(metric.interval)),
        Cell(f"{metric.n_steps[0]}+{metric.n_steps[1]}" if any(metric.n_steps) else UNKNOWN),
        Cell(f"{metric.p:.2g}" if metric.p is not None else UNKNOWN),
    )


def _relative(metric: Metric) -> str:
    """Return the relative change, ``~`` where it is the same and ``?`` where it is unclear."""
    if metric.verdict == "same":
        return "~"
    if metric.verdict == "unclear":
        return "?"
    if metric.relative is not None and metric.relative + 1 >= _HUGE:
        return f"x {_HUGE:,}+"
    return format_relative(metric.relative)


def _basis(metric: Metric) -> str:
    if metric.unit in ("bytes", "count") and not _varies(metric):
        return "exact"
    return f"{metric.n_launches[0]}+{metric.n_launches[1]}"


def _varies(metric: Metric) -> bool:
    """Return whether identical launches differ in it, always or as seen here."""
    seen = any(warning.startswith("varies between") for warning in metric.warnings)
    return metric.name in VARYING or seen


def _spread_lines(metrics: Sequence[Metric]) -> list[Block]:
    lines: list[Block] = []
    for metric in metrics:
        if metric.interval is None:
            continue
        chance = f", p = {metric.p:.2g}" if metric.p is not None else ""
        text = (
            f"{metric_label(metric)}: {format_relative(metric.relative)}, "
            f"95 % interval {interval(metric.interval)}, "
            f"{metric.n_launches[0]} + {metric.n_launches[1]} launches, "
            f"{metric.n_steps[0]} + {metric.n_steps[1]} steps{chance}."
        )
        lines.append(Prose(text=text, only="narrow"))
    return lines


def _legend() -> list[Block]:
    return [
        Prose(
            text=f"~ the same, ? not clear, {UNKNOWN} not known; n: launches of A + B, or exact.",
            tone="muted",
        )
    ]


def _waterfall(comparison: Comparison, runs_a: Sequence[Run], runs_b: Sequence[Run]) -> list[Block]:
    sides = _categories(comparison, runs_a, runs_b)
    if sides is None:
        return []
    return [
        PlotFigure(
            title="From A's peak to B's peak",
            draw=partial(plots.waterfall, *sides, names=plots.side_names(comparison)),
            caption="Allocated at the step's peak; each bar is what one category adds or takes.",
        )
    ]


def _categories(
    comparison: Comparison, runs_a: Sequence[Run], runs_b: Sequence[Run]
) -> tuple[dict[str, int], dict[str, int]] | None:
    """Return category -> bytes at the peak of A and of B, from the metrics or else the runs."""
    rows = [
        m
        for m in comparison.metrics
        if m.name == "category_bytes" and m.category is not None
        if m.phase is None and m.rank is None
    ]
    if rows:
        return (
            {str(m.category): int(m.a or 0) for m in rows},
            {str(m.category): int(m.b or 0) for m in rows},
        )
    found_a = facts.anatomy_of(runs_a[0]) if runs_a else None
    found_b = facts.anatomy_of(runs_b[0]) if runs_b else None
    if found_a is None or found_b is None:
        return None
    return found_a[1].categories, found_b[1].categories
