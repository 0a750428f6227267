"""The time sections of a run's report."""

from __future__ import annotations

from functools import partial

from fsdp_doctor.model.run import RankSeries, Run, TimeBreakdown
from fsdp_doctor.report import facts, plots
from fsdp_doctor.report.document import Block, Cell, Column, PlotFigure, Prose, Section, Table
from fsdp_doctor.report.words import UNKNOWN, optional, plural, seconds, share, words


def time_sections(run: Run) -> list[Section]:
    """Return where the run's time went, and whether its loss stayed finite."""
    sections = [Section(title="Step time", blocks=_time_blocks(run))]
    told = next((series for series in run.ranks if series.time_breakdown), None)
    if told is not None:
        sections.append(_breakdown_section(told))
    sections.append(Section(title="Loss", blocks=(_loss(run),)))
    return sections


def _time_blocks(run: Run) -> tuple[Block, ...]:
    steps = facts.step_times(run)
    if not steps:
        return (Prose(text="No timed step was recorded.", tone="muted"),)
    rows = [_time_row("whole step", steps, strong=True)]
    rows += [_time_row(words(phase), times) for phase, times in facts.phase_times(run).items()]
    slow = facts.most_often_slowest(steps)
    caption = f"{plural(len(steps), 'timed step')}; each step counts with its slowest rank."
    if slow is not None:
        caption += f" Rank {slow[0]} was the slowest in {slow[1]} of {len(steps)}."
    if run.manifest.source == "one_rank":
        caption += " One rank alone: communication takes no time here."
    table = Table(
        columns=(
            Column("phase"),
            Column("median", "number"),
            Column("p10", "number"),
            Column("p90", "number"),
            Column("slowest rank", "number"),
        ),
        rows=tuple(rows),
        caption=caption,
    )
    plot = PlotFigure(title="Time of each step", draw=partial(plots.step_times, [("", [run])]))
    tokens = run.manifest.tokens_per_step
    whole = facts.spread(time_s for time_s, _ in facts.slowest(steps))
    if tokens is None or whole is None or not whole.median:
        return (table, plot)
    rate = Prose(text=f"{tokens / whole.median:,.0f} tokens/s over all ranks at the median step.")
    return (table, rate, plot)


def _time_row(
    name: str, times: dict[int, dict[int, float]], *, strong: bool = False
) -> tuple[Cell, ...]:
    spread = facts.spread(time_s for time_s, _ in facts.slowest(times))
    slow = facts.most_often_slowest(times)
    return (
        Cell(name, "strong" if strong else "plain"),
        seconds(spread.median if spread else None),
        seconds(spread.p10 if spread else None),
        seconds(spread.p90 if spread else None),
        Cell(optional(slow[0] if slow else None)),
    )


def _breakdown_section(series: RankSeries) -> Section:
    table = Table(
        columns=(
            Column("phase"),
            Column("wall", "number"),
            Column("kernels", "number"),
            Column("exposed comm.", "number"),
            Column("copies", "number"),
            Column("idle", "number"),
            Column("idle share", "number"),
            Column("all comm.", "number", only="wide"),
        ),
        rows=tuple(_breakdown_row(item) for item in series.time_breakdown),
        caption=(
            f"Rank {series.rank}, one untimed step under torch's profiler. Exposed: communication "
            "not covered by computation."
        ),
    )
    plot = PlotFigure(
        title="Where a step's time went", draw=partial(plots.time_breakdown, series.time_breakdown)
    )
    return Section(title="Time by what the device did", blocks=(table, plot))


def _breakdown_row(item: TimeBreakdown) -> tuple[Cell, ...]:
    return (
        Cell(words(item.phase)),
        seconds(item.wall_s),
        seconds(item.kernel_s),
        seconds(item.exposed_communication_s),
        seconds(item.copy_s),
        seconds(item.idle_s),
        Cell(share(item.idle_s, item.wall_s)),
        seconds(item.communication_s),
    )


def _loss(run: Run) -> Prose:
    finite, known, first_bad = facts.loss_facts(run)
    if not known:
        return Prose(text=f"Finite: {UNKNOWN} (no loss was recorded).", tone="muted")
    if first_bad is None:
        return Prose(text=f"Finite: yes, in all {plural(known, 'record')}.", tone="good")
    step, rank = first_bad
    return Prose(
        text=f"Finite: NO. First not finite in step {step} on rank {rank}; {known - finite} of "
        f"{plural(known, 'record')} are not.",
        tone="bad",
    )
