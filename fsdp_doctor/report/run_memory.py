"""The memory sections of a run's report."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fsdp_doctor.model.memory import Anatomy, TopAllocation
from fsdp_doctor.model.run import RankSeries, Run
from fsdp_doctor.report import facts, plots
from fsdp_doctor.report.document import (
    Block,
    Cell,
    Column,
    Facts,
    Footnotes,
    PlotFigure,
    Prose,
    Section,
    Table,
)
from fsdp_doctor.report.run_ranks import ranks_section
from fsdp_doctor.report.words import optional, share, size, size_range, words
from fsdp_doctor.runs.summary import resident_bytes, steady_steps
from fsdp_doctor.units import format_bytes

MAX_TOP_ALLOCATIONS = 20


def memory_sections(run: Run, notes: Footnotes) -> list[Section]:
    """Return what the run did with memory."""
    series = facts.first_rank(run)
    if series is None:
        return []
    sections = [Section(title="Memory per phase", blocks=_phase_blocks(run, series))]
    found = facts.anatomy_of(run)
    if found is not None:
        rank, anatomy = found
        sections.append(_peak_section(run, rank, anatomy, notes))
        if anatomy.top_allocations:
            sections.append(_top_section(anatomy))
    sections.append(Section(title="Memory in numbers", blocks=(_numbers(run, series),)))
    if len(run.ranks) > 1:
        sections.append(ranks_section(run))
    return sections


def _phase_blocks(run: Run, series: RankSeries) -> tuple[Block, ...]:
    rows = facts.phase_memory(series)
    if not rows:
        return (Prose(text="No phase was recorded.", tone="muted"),)
    many = len(run.ranks) > 1
    columns = [
        Column("phase"),
        Column("end", "number"),
        Column("peak allocated", "number"),
        Column("reserved", "number"),
    ]
    over_ranks: list[tuple[Cell, ...]] = [() for _ in rows]
    if many:
        columns.append(Column("peak, min .. max of ranks", "number"))
        over_ranks = [(_peak_over_ranks(run, row),) for row in rows]
    highest = max((row.peak_bytes or 0 for row in rows), default=0)
    return (
        Table(
            columns=tuple(columns),
            rows=tuple(
                (
                    Cell(words(row.phase)),
                    size(row.end_bytes),
                    size(row.peak_bytes, "strong" if row.peak_bytes == highest else "plain"),
                    size(row.reserved_bytes),
                    *extra,
                )
                for row, extra in zip(rows, over_ranks, strict=True)
            ),
            caption=f"Rank {series.rank}; largest over {_steps_text(series)}.",
        ),
    )


def _steps_text(series: RankSeries) -> str:
    steps = facts.memory_steps(series)
    if not steps:
        return "the set-up (no step was recorded)"
    if len(steps) == 1:
        return f"step {steps[0].step}"
    kind = "timed steps" if all(s.kind == "timed" for s in steps) else "steps"
    return f"{kind} {steps[0].step} to {steps[-1].step}"


def _peak_over_ranks(run: Run, row: facts.PhaseMemory) -> Cell:
    def peak_of(series: RankSeries) -> int | None:
        known = [p.peak_bytes for p in facts.phase_memory(series) if p.phase == row.phase]
        return known[0] if known else None

    return Cell(size_range(facts.spread_over_ranks(run, peak_of)))


def _peak_section(run: Run, rank: int, anatomy: Anatomy, notes: Footnotes) -> Section:
    """Return what filled the memory: at the failing moment where there is one, and at the peak."""
    marks = (
        (notes.add(f"anatomy of rank {rank}: {anatomy.incomplete}"),) if anatomy.incomplete else ()
    )
    unfinished = facts.unfinished_step(run) == anatomy.step
    which, after = "the step's peak", anatomy.resident
    if unfinished:
        which, after = "the highest moment before it ended", {}
    caption = f"Rank {rank}, step {anatomy.step}: {which}, in {words(anatomy.peak_phase)}"
    table = _category_table(
        anatomy.categories,
        anatomy.peak_allocated_bytes,
        after,
        marks,
        caption=caption + (", and what stays after the step." if after else "."),
    )
    blocks: list[Block] = [*_failing_blocks(run, rank, anatomy), table]
    if anatomy.phases:
        plot = PlotFigure(
            title="Peak of each phase by category",
            draw=partial(plots.phase_categories, [("", anatomy)]),
            caption="Allocated bytes at the moment of each phase's peak.",
        )
        blocks += [plot, _phase_matrix(anatomy)]
    return Section(title="What filled the memory", blocks=tuple(blocks))


def _failing_blocks(run: Run, rank: int, anatomy: Anatomy) -> list[Block]:
    """Return what was alive in the phase that failed, and the request, where both are known."""
    failure = run.manifest.failure
    if failure is None or failure.phase is None or facts.unfinished_step(run) != anatomy.step:
        return []
    part = anatomy.phases.get(str(failure.phase))
    if part is None or not part.categories or failure.rank not in (None, rank):
        return []
    phase = words(failure.phase)
    table = _category_table(
        part.categories,
        part.peak_allocated_bytes,
        {},
        title=f"In {phase}, which failed",
        caption=f"Rank {rank}, step {anatomy.step}: the most that was alive in {phase}.",
    )
    if failure.requested_bytes is None:
        return [table]
    asked = format_bytes(failure.requested_bytes)
    needed = format_bytes(part.peak_allocated_bytes + failure.requested_bytes)
    return [table, Prose(text=f"It asked for {asked} more: {needed} in all.", tone="bad")]


def _category_table(
    categories: Mapping[str, int],
    total: int,
    after: Mapping[str, int],
    marks: tuple[int, ...] = (),
    *,
    title: str = "",
    caption: str,
) -> Table:
    """Return categories with their shares of ``total``, and what stays of each where known."""
    columns = [
        Column("category"),
        Column("alive" if title else "at the peak", "number"),
        Column("share", "number"),
        Column("", "bar"),
    ]
    rows = [
        (
            Cell(words(category), color=category),
            size(size_bytes),
            Cell(share(size_bytes, total)),
            Cell("", bar=size_bytes / total if total else 0.0, color=category),
            size(after.get(category, 0)),
        )
        for category, size_bytes in facts.by_size(categories)
    ]
    whole = (Cell("all", "strong", marks), size(total, "strong"), Cell(""), Cell(""))
    rows.append((*whole, size(sum(after.values()), "strong")))
    if after:
        columns.append(Column("between steps", "number"))
    return Table(
        title=title,
        columns=tuple(columns),
        rows=tuple(row[: len(columns)] for row in rows),
        caption=caption,
    )


def _phase_matrix(anatomy: Anatomy) -> Table:
    phases = facts.ordered_phases(anatomy.phases)
    totals: dict[str, int] = {}
    for phase in anatomy.phases.values():
        for category, size_bytes in phase.categories.items():
            totals[category] = max(totals.get(category, 0), size_bytes)
    rows = [
        (
            Cell(words(category), color=category),
            *(size(anatomy.phases[p].categories.get(category, 0)) for p in phases),
        )
        for category, _ in facts.by_size(totals)
    ]
    rows.append(
        (
            Cell("all", "strong"),
            *(size(anatomy.phases[p].peak_allocated_bytes, "strong") for p in phases),
        )
    )
    return Table(
        title="At the peak of each phase",
        columns=(Column("category"), *(Column(words(p), "number") for p in phases)),
        rows=tuple(rows),
    )


def _top_section(anatomy: Anatomy) -> Section:
    top = sorted(anatomy.top_allocations, key=lambda t: -t.bytes)
    table = Table(
        columns=(
            Column("bytes", "number"),
            Column("blocks", "number"),
            Column("category"),
            Column("born in", only="wide"),
            Column("module", "code", only="wide"),
            Column("operator", "code", only="wide"),
            Column("frame", "path", only="wide"),
            Column("module, operator, frame", "path", only="narrow"),
        ),
        rows=tuple(_top_row(entry) for entry in top[:MAX_TOP_ALLOCATIONS]),
        caption="Blocks alive at the step's peak, added up by the code that asked for them.",
    )
    rest = top[MAX_TOP_ALLOCATIONS:]
    more = (
        (
            Prose(
                text=f"{len(rest)} smaller groups hold {format_bytes(sum(t.bytes for t in rest))}.",
                tone="muted",
            ),
        )
        if rest
        else ()
    )
    return Section(title="Largest allocations at the peak", blocks=(table, *more))


def _top_row(entry: TopAllocation) -> tuple[Cell, ...]:
    category = words(entry.category)
    if entry.subcategory:
        category += f" ({words(entry.subcategory)})"
    born = words(entry.phase) + (f", step {entry.step}" if entry.step is not None else "")
    frame = entry.frames[0] if entry.frames else None
    places = [place for place in (entry.module, entry.operator, frame) if place]
    return (
        size(entry.bytes),
        Cell(str(entry.count)),
        Cell(category, color=entry.category),
        Cell(born),
        Cell(optional(entry.module)),
        Cell(optional(entry.operator)),
        Cell("\n".join(entry.frames[:3]) or optional(None)),
        Cell("\n".join(places) or optional(None)),
    )


def _numbers(run: Run, series: RankSeries) -> Facts:
    retries = facts.last_known(series, "allocation_retries")
    seen = "steady" if steady_steps(series) else "all steps seen"
    items: list[tuple[str, Cell]] = [
        ("peak allocated, first step", size(facts.first_step_peak_bytes(series))),
        (f"peak allocated, {seen}", size(facts.peak_bytes(series))),
        (f"peak reserved, {seen}", size(facts.peak_bytes(series, "reserved_bytes"))),
        ("resident between steps", size(resident_bytes(series))),
        ("reserved - allocated, after a step", size(facts.unused_reserved_bytes(series))),
        ("device used outside PyTorch", size(facts.outside_pytorch_bytes(series))),
        ("device used, all processes", size(facts.last_known(series, "device_used_bytes"))),
        ("host memory of the process", size(facts.last_known(series, "host_rss_bytes"))),
        ("allocation retries", Cell(optional(retries), "warn" if retries else "plain")),
        ("out-of-memory events", Cell(optional(facts.last_known(series, "out_of_memory_count")))),
    ]
    found = facts.anatomy_of(run)
    if found is not None:
        expected = [
            (f"expected {words(name)} (from shapes)", size(value))
            for name, value in found[1].expected_bytes.items()
        ]
        items += expected
    return Facts(items=(("rank", Cell(str(series.rank))), *items))
