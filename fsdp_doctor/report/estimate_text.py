"""An estimate for the terminal, and as the JSON contract's keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, Any

from fsdp_doctor.model.estimate import Estimate, RankEstimate, StepEstimate
from fsdp_doctor.report.base import DocumentRenderer, renderer_for
from fsdp_doctor.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Facts,
    Notes,
    Section,
    Table,
    printable,
)
from fsdp_doctor.report.palette import category_order
from fsdp_doctor.report.words import plural, share, size, size_range, time_range, words
from fsdp_doctor.units import format_bytes

Swept = tuple[str, Estimate]
"""(``KEY=VALUE`` that was set, its estimate)."""

_SHOWN = 12
_UNNAMED = "-"


def estimate_payload(estimate: Estimate) -> dict[str, Any]:
    """Return the keys of the JSON contract."""
    return {
        "world_size": estimate.world_size,
        "gpu": estimate.gpu,
        "memory_bytes": estimate.memory_bytes,
        "fits": estimate.fits,
        "headroom_bytes": estimate.headroom_bytes,
        "method": estimate.method,
        "assumptions": list(estimate.assumptions),
        "outside_pytorch_bytes": list(estimate.outside_pytorch_bytes),
        "ranks": [
            {
                "rank": rank.rank,
                "first_step": rank.first_step,
                "steady": rank.steady,
                "top_allocations": rank.top_allocations,
                "setup_peak_bytes": rank.setup_peak_bytes,
                "events": rank.events,
                "layers": rank.layers,
            }
            for rank in estimate.ranks
        ],
        "step_time": estimate.step_time,
    }


def render_estimate(
    estimate: Estimate,
    name: str,
    stream: IO[str],
    *,
    sweep: Sequence[Swept] = (),
    color: bool = False,
    width: int = 80,
) -> None:
    """Write the estimate to ``stream``; ``sweep``: what was changed -> its estimate."""
    renderer = renderer_for("terminal", color=color, width=width)
    assert isinstance(renderer, DocumentRenderer)
    stream.write(renderer.render_document(estimate_document(estimate, name, sweep)))


def estimate_document(estimate: Estimate, name: str, sweep: Sequence[Swept] = ()) -> Document:
    """Return the estimate as a report."""
    sections = [Section(title="Answer", blocks=(Facts(items=tuple(_answer(estimate))),))]
    if sweep:
        table = _sweep([("as written", estimate), *sweep])
        sections.append(Section(title="What if", blocks=(table,)))
    for rank in estimate.ranks:
        sections.extend(_rank_sections(rank))
    sections.append(Section(title="Assumptions", blocks=(Notes(items=_assumptions(estimate)),)))
    ranks = plural(estimate.world_size, "rank")
    return Document(
        title=printable(name),
        subtitle=f"{ranks} of {estimate.gpu}, {estimate.method}: no GPU was used",
        badge=_verdict(estimate.fits),
        sections=tuple(sections),
    )


def _assumptions(estimate: Estimate) -> tuple[str, ...]:
    guess = estimate.step_time
    return estimate.assumptions + (() if guess is None else guess.assumptions)


def _sweep(rows: Sequence[Swept]) -> Table:
    """Return one row for each variant: the largest of its ranks."""
    cells = []
    for text, variant in rows:
        largest = max(variant.ranks, key=lambda rank: rank.steady.peak_allocated_bytes)
        steady = largest.steady
        cells.append(
            (
                Cell(printable(text)),
                size(steady.peak_allocated_bytes),
                size(steady.peak_reserved_bytes),
                size(steady.resident_bytes),
                Cell(words(steady.peak_phase.value)),
                _verdict(variant.fits),
            )
        )
    columns = (
        Column("change", "code"),
        Column("allocated", "number"),
        Column("reserved", "number"),
        Column("between", "number"),
        Column("peak in"),
        Column(""),
    )
    return Table(columns=columns, rows=tuple(cells))


def _verdict(fits: bool | None) -> Cell:
    if fits is None:
        return Cell("may fit", "warn")
    return Cell("fits", "good") if fits else Cell("does not fit", "bad")


def _answer(estimate: Estimate) -> Iterator[tuple[str, Cell]]:
    largest = max(estimate.ranks, key=lambda rank: rank.steady.peak_allocated_bytes)
    steady = largest.steady
    reserved = (steady.peak_reserved_low_bytes, steady.peak_reserved_bytes)
    yield "peak allocated", size(steady.peak_allocated_bytes, "strong")
    yield "peak reserved", Cell(size_range(reserved))
    yield "between steps", size(steady.resident_bytes)
    yield "outside PyTorch", Cell(size_range(estimate.outside_pytorch_bytes))
    yield "memory of the GPU", size(estimate.memory_bytes)
    tone = _verdict(estimate.fits).tone
    yield "left over", Cell(format_bytes(estimate.headroom_bytes), tone)
    if estimate.step_time is not None:
        yield "step time", Cell(time_range(estimate.step_time.total), "muted")


def _rank_sections(rank: RankEstimate) -> Iterator[Section]:
    steady = rank.steady
    yield Section(
        title=f"Rank {rank.rank}",
        blocks=(_phases(rank), _categories(steady)),
    )
    yield Section(title="Largest allocations at the peak", level=2, blocks=(_tops(rank),))


def _phases(rank: RankEstimate) -> Table:
    rows = []
    for label, step in (("first", rank.first_step), ("steady", rank.steady)):
        for name, phase in step.phases.items():
            tone = "strong" if name == step.peak_phase.value else "plain"
            rows.append(
                (
                    Cell(label),
                    Cell(words(name)),
                    size(phase.peak_allocated_bytes, tone),  # type: ignore[arg-type]
                    size(phase.end_allocated_bytes),
                    size(phase.peak_reserved_bytes),
                )
            )
    columns = (
        Column("step"),
        Column("phase"),
        Column("peak", "number"),
        Column("at its end", "number"),
        Column("reserved", "number"),
    )
    return Table(columns=columns, rows=tuple(rows), title="Allocated by phase")


def _categories(step: StepEstimate) -> Block:
    names = sorted(set(step.categories) | set(step.resident), key=category_order)
    rows = [
        (
            Cell(words(name), color=name),
            size(step.categories.get(name, 0)),
            Cell(share(step.categories.get(name, 0), step.peak_allocated_bytes)),
            size(step.resident.get(name, 0)),
        )
        for name in names
    ]
    total = size(step.peak_allocated_bytes, "strong")
    rows.append((Cell("sum", "strong"), total, Cell("100.0 %"), size(step.resident_bytes)))
    columns = (
        Column("category"),
        Column("at the peak", "number"),
        Column("share", "number"),
        Column("between steps", "number"),
    )
    title = f"What fills the peak of a steady step ({words(step.peak_phase.value)})"
    return Table(columns=columns, rows=tuple(rows), title=title)


def _tops(rank: RankEstimate) -> Table:
    rows = [
        (
            size(top.bytes),
            Cell(str(top.count)),
            Cell(words(top.category.value), color=top.category.value),
            Cell(printable(top.module or _UNNAMED)),
            Cell(printable(top.operator or _UNNAMED)),
        )
        for top in rank.top_allocations[:_SHOWN]
    ]
    columns = (
        Column("bytes", "number"),
        Column("blocks", "number"),
        Column("category"),
        Column("module", "code"),
        Column("operator", "code"),
    )
    return Table(columns=columns, rows=tuple(rows))
