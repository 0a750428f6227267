"""Tables of a snapshot's report: allocations, steps, growth, free memory."""

from __future__ import annotations

from fsdp_doctor.model.memory import TopAllocation
from fsdp_doctor.model.snapshot import PinnedSegment, PoolSpace, SnapshotAnalysis, StepSummary
from fsdp_doctor.redact import redact_text
from fsdp_doctor.report.document import Block, Cell, Column, Prose, Section, Table
from fsdp_doctor.report.snapshot_cards import allocation_words
from fsdp_doctor.report.words import UNKNOWN, optional, size, words
from fsdp_doctor.units import format_bytes

MAX_TOPS = 15
MAX_STEPS = 10


def tops_section(shown: SnapshotAnalysis) -> list[Section]:
    """Return the largest allocations at the moment of interest."""
    tops = shown.focus.top_allocations
    if not tops:
        return []
    where = "when the request failed" if shown.oom else "at the peak"
    blocks: list[Block] = [
        tops_table(tops[:MAX_TOPS], f"Blocks alive {where}, added up by the code that asked.")
    ]
    rest = tops[MAX_TOPS:]
    if rest:
        text = f"{len(rest)} more groups hold {format_bytes(sum(t.bytes for t in rest))}."
        blocks.append(Prose(text=text, tone="muted"))
    return [Section(title=f"Largest allocations {where}", blocks=tuple(blocks))]


def tops_table(tops: tuple[TopAllocation, ...], caption: str) -> Table:
    """Return allocations by the code that asked for them."""
    return Table(
        columns=(
            Column("bytes", "number"),
            Column("blocks", "number"),
            Column("category"),
            Column("born in", only="wide"),
            Column("unit", "code", only="wide"),
            Column("operator", "code", only="wide"),
            Column("stack", "path", only="wide"),
            Column("unit, operator, stack", "path", only="narrow"),
        ),
        rows=tuple(_top_row(top) for top in tops),
        caption=caption,
    )


def _top_row(top: TopAllocation) -> tuple[Cell, ...]:
    frames = [redact_text(frame) for frame in top.frames[:3]]
    step = f", step {top.step}" if top.step is not None and top.step >= 0 else ""
    places = [place for place in (top.module, top.operator, *frames[:2]) if place]
    return (
        size(top.bytes),
        Cell(str(top.count)),
        Cell(allocation_words(top), color=top.category),
        Cell(words(top.phase) + step),
        Cell(optional(top.module)),
        Cell(optional(top.operator)),
        Cell("\n".join(frames) or UNKNOWN),
        Cell("\n".join(places) or UNKNOWN),
    )


def steps_section(shown: SnapshotAnalysis) -> list[Section]:
    """Return the peak of each step, the first and the last ones where there are many."""
    steps = shown.steps
    if not steps:
        return []
    chosen = steps if len(steps) <= MAX_STEPS else (*steps[:3], *steps[-(MAX_STEPS - 3) :])
    table = Table(
        columns=(
            Column("step", "number"),
            Column("at its begin", "number"),
            Column("peak allocated", "number"),
            Column("peak reserved", "number"),
            Column("peak is in"),
        ),
        rows=tuple(_step_row(step) for step in chosen),
        caption="" if len(chosen) == len(steps) else f"{len(chosen)} of {len(steps)} steps.",
    )
    return [Section(title="Steps", blocks=(table,))]


def _step_row(step: StepSummary) -> tuple[Cell, ...]:
    return (
        Cell(str(step.step)),
        size(step.start_allocated_bytes),
        size(step.peak_allocated_bytes),
        size(step.peak_reserved_bytes),
        Cell(words(step.peak_phase) + ("" if step.complete else " (not complete)")),
    )


def growth_section(shown: SnapshotAnalysis) -> list[Section]:
    """Return what is kept from step to step, where memory grows."""
    growth = shown.growth
    if growth is None or not growth.leaking:
        return []
    text = (
        f"Each step leaves {format_bytes(growth.per_step_bytes)} more behind than the one "
        "before it. These blocks are still alive when the last step begins:"
    )
    table = tops_table(growth.suspects, "Born in the steps shown, by code that keeps some in most.")
    blocks: tuple[Block, ...] = (Prose(text=text, tone="bad"), table)
    return [Section(title="Growth from step to step", blocks=blocks)]


def space_sections(shown: SnapshotAnalysis) -> list[Section]:
    """Return how reserved memory is divided, and what pins segments."""
    space = shown.space
    if not space.pools:
        return []
    when = "when the request failed" if shown.oom else "at the end"
    pools = Table(
        columns=(
            Column("blocks"),
            Column("reserved", "number"),
            Column("free", "number"),
            Column("largest free", "number"),
            Column("can be released", "number"),
            Column("segments", "number"),
        ),
        rows=tuple(_pool_row(pool) for pool in space.pools[:20]),
        caption=f"Reserved memory {when}, by kind: a request is served by its own kind only.",
    )
    sections = [Section(title="Free memory inside PyTorch", blocks=(pools,))]
    if space.pinned:
        pinned = Table(
            columns=(
                Column("segment", "number"),
                Column("free", "number"),
                Column("blocks", "number"),
                Column("largest block", "number"),
                Column("what it is", "path"),
            ),
            rows=tuple(_pinned_row(segment) for segment in space.pinned[:8]),
            caption=(
                f"{format_bytes(space.pinned_free_bytes)} are free in segments that other blocks "
                "keep; these have the most."
            ),
        )
        sections.append(Section(title="What pins free memory", blocks=(pinned,)))
    return sections


def pool_name(pool: PoolSpace) -> str:
    """Return a kind of memory in words."""
    name = "above 1 MiB" if pool.large else "up to 1 MiB"
    if pool.stream:
        name += f", stream {pool.stream:#x}"
    if pool.pool != (0, 0):
        name += f", private pool {pool.pool[0]}.{pool.pool[1]}"
    return name


def _pool_row(pool: PoolSpace) -> tuple[Cell, ...]:
    return (
        Cell(pool_name(pool)),
        size(pool.reserved_bytes),
        size(pool.free_bytes),
        size(pool.largest_free_bytes),
        size(pool.releasable_bytes),
        Cell(str(pool.segments)),
    )


def _pinned_row(segment: PinnedSegment) -> tuple[Cell, ...]:
    top = segment.pinned_by
    place = top.module or (redact_text(top.frames[0]) if top.frames else None) or top.operator
    return (
        size(segment.size_bytes),
        size(segment.free_bytes),
        Cell(str(segment.blocks)),
        size(top.bytes),
        Cell(allocation_words(top) + (f"\n{place}" if place else "")),
    )
