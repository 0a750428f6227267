"""The answer of ``fit`` as a report, and as the JSON contract's keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.fit import Fit, Measured, Numerics, RelativeRange, Variant
from fsdp_doctor.report.base import DocumentRenderer, renderer_for
from fsdp_doctor.report.document import (
    Card,
    Cell,
    Column,
    Document,
    Facts,
    Line,
    Notes,
    Prose,
    Section,
    Table,
    printable,
)
from fsdp_doctor.report.words import UNKNOWN, plural, size, size_range, time_range
from fsdp_doctor.units import format_bytes, format_relative, format_seconds

NUMERICS: dict[Numerics, str] = {
    "same": "same",
    "rounding": "rounds more",
    "precision": "fewer bits",
}
_NUMERICS_NOTE = (
    "numbers: same (the same sums, perhaps in another order), rounds more (products or reductions "
    "in fewer bits), fewer bits (weights or optimizer state are kept in fewer bits: look at "
    "convergence)"
)
_TIME_NOTE = (
    "step time: both specs at the same end of the range; how far apart the ends are is no measure "
    "of how sure it is, and a job that waits for its host is slower than guessed"
)
_VERIFIED = {"recorded": "recorded run", "verified": "real run"}


def fit_payload(fit: Fit) -> dict[str, Any]:
    """Return the keys of the JSON contract."""
    return {item.name: getattr(fit, item.name) for item in fields(fit)}


def render_fit(fit: Fit, name: str, fmt: str, **options: Any) -> str:
    """Return the answer in a format. Raises InputError for csv, which has no table for it."""
    if fmt == "json":
        from fsdp_doctor.report.json_format import encode_envelope

        return encode_envelope("fit", fit_payload(fit)) + "\n"
    renderer = renderer_for(fmt, **options)
    if not isinstance(renderer, DocumentRenderer):
        raise InputError(f"fit has no {fmt} report", hint="terminal, html, markdown or json")
    return renderer.render_document(fit_document(fit, name))


def fit_document(fit: Fit, name: str) -> Document:
    """Return the answer as a report."""
    sections = [Section(title="As written", blocks=(Facts(items=tuple(_written(fit))),))]
    if fit.prescriptions:
        sections.append(Section(title="Changes that make it fit", blocks=(_table(fit),)))
        cards = tuple(_card(n, v) for n, v in enumerate(fit.prescriptions, 1))
        sections.append(Section(title="What to change", blocks=cards))
    elif not _comfortable(fit.as_written):
        sections.append(Section(title="Nothing fits", blocks=tuple(_nothing(fit))))
    refused = tuple(f"{item.title}: {item.reason}" for item in fit.refused)
    if refused:
        sections.append(
            Section(title="Not offered", blocks=(Notes(items=refused),), collapsed=True)
        )
    notes = (*_search_notes(fit), _NUMERICS_NOTE, _TIME_NOTE, *fit.assumptions)
    sections.append(Section(title="Assumptions", blocks=(Notes(items=notes),), collapsed=True))
    return Document(
        title=printable(name),
        subtitle=f"{plural(fit.world_size, 'rank')} of {fit.gpu} with "
        f"{format_bytes(fit.memory_bytes)}, simulated",
        badge=_badge(fit),
        sections=tuple(sections),
    )


def _comfortable(variant: Variant) -> bool:
    return variant.fits is True and variant.headroom_bytes >= 0


def _badge(fit: Fit) -> Cell:
    if _comfortable(fit.as_written):
        return Cell("fits as written", "good")
    if fit.prescriptions:
        sure = all(_comfortable(variant) for variant in fit.prescriptions)
        found = plural(len(fit.prescriptions), "way")
        return Cell(f"{found} to make it fit" + ("" if sure else ", perhaps"), "warn")
    return Cell("no change makes it fit", "bad")


def _written(fit: Fit) -> Iterator[tuple[str, Cell]]:
    variant = fit.as_written
    yield "peak allocated", size(variant.peak_allocated_bytes)
    yield "peak reserved", size(variant.peak_reserved_bytes, "strong")
    yield "outside PyTorch", Cell(size_range(fit.outside_pytorch_bytes))
    yield "memory of the GPU", size(fit.memory_bytes)
    yield "left over", _left(variant)
    if variant.step_time is not None:
        yield "step time", Cell(time_range(variant.step_time), "muted")
    for measured in variant.measured:
        yield _VERIFIED[measured.kind], Cell(_measured(measured, variant))


def _left(variant: Variant) -> Cell:
    text = format_bytes(variant.headroom_bytes)
    if variant.fits is False:
        return Cell(f"{text}: does not fit", "bad")
    if variant.fits is None:
        return Cell(f"{text}: may fit", "warn")
    if variant.headroom_bytes < 0:
        return Cell(f"{text}: fits while cached segments are given back", "warn")
    return Cell(text, "good")


def _table(fit: Fit) -> Table:
    rows = []
    for number, variant in enumerate(fit.prescriptions, 1):
        tone = "good" if _comfortable(variant) else "warn"
        rows.append(
            (
                Cell(str(number)),
                Cell(printable(_titles(variant))),
                size(variant.peak_reserved_bytes),
                Cell(format_bytes(variant.headroom_bytes), tone),  # type: ignore[arg-type]
                Cell(_relative(variant.step_time_change), "muted"),
                Cell(NUMERICS[variant.numerics], "plain" if variant.numerics == "same" else "warn"),
            )
        )
    columns = (
        Column("", "number"),
        Column("change"),
        Column("reserved", "number"),
        Column("left over", "number"),
        Column("step time, guess", "number"),
        Column("numbers"),
    )
    return Table(columns=columns, rows=tuple(rows))


def _titles(variant: Variant) -> str:
    return " + ".join(change.title for change in variant.changes) or "as written"


def _relative(change: RelativeRange | None) -> str:
    if change is None:
        return UNKNOWN
    low, high = format_relative(change.low), format_relative(change.high)
    return low if low == high else f"{low} .. {high}"


def _card(number: int, variant: Variant) -> Card:
    lines = [Line(label="set", text=f"--set {text}", code=True) for text in variant.overrides]
    lines += [
        Line(label="export", text=f"{name}={value}", code=True)
        for name, value in variant.environment.items()
    ]
    for change in variant.changes:
        lines.append(Line(label="saves", text=change.saves))
    for change in variant.changes:
        lines.append(Line(label="costs", text=change.costs))
    lines.append(
        Line(
            label="peak",
            text=f"{format_bytes(variant.peak_allocated_bytes)} allocated, "
            f"{format_bytes(variant.peak_reserved_bytes)} reserved",
        )
    )
    lines += [Line(label="warning", text=text) for text in variant.warnings]
    for measured in variant.measured:
        text = _measured(measured, variant)
        lines.append(Line(label=_VERIFIED[measured.kind], text=printable(text)))
    return Card(title=f"{number}. {printable(_titles(variant))}", tone="strong", lines=tuple(lines))


def _measured(measured: Measured, variant: Variant) -> str:
    """What a real run showed, beside what was predicted."""
    if measured.status != "completed":
        note = f" ({measured.note})" if measured.note else ""
        return f"{measured.source}: {measured.status}{note}"
    parts = []
    if measured.peak_allocated_bytes:
        off = variant.peak_allocated_bytes / measured.peak_allocated_bytes - 1
        beside = "on a CPU, tensors alone"
        if measured.device_type == "cuda":
            beside = f"predicted {off:+.3%}"
        parts.append(f"{format_bytes(measured.peak_allocated_bytes)} allocated ({beside})")
    if measured.peak_reserved_bytes:
        parts.append(f"{format_bytes(measured.peak_reserved_bytes)} reserved")
    if measured.step_time_s is not None:
        text = f"step {format_seconds(measured.step_time_s)}"
        if measured.step_time_change is not None:
            text += f" ({format_relative(measured.step_time_change)})"
        parts.append(text)
    note = f"; {measured.note}" if measured.note else ""
    return f"{measured.source}: {', '.join(parts)}{note}"


def _nothing(fit: Fit) -> Iterator[Card | Prose]:
    least = fit.smallest
    short = -least.headroom_bytes
    yield Prose(
        text=f"The smallest peak that was reached needs {format_bytes(short)} more than there is.",
        tone="bad",
    )
    yield _card(1, least)
    needed = fit.needed
    if needed is None:
        yield Prose(text="More ranks would not make a rank's part smaller.")
    elif needed.world_size is None:
        most = max(needed.tried, default=fit.world_size)
        yield Prose(
            text=f"With these changes not even {most:,} ranks would do: what remains is not "
            "sharded (activations, logits, gathered units)."
        )
    else:
        peak = format_bytes(needed.peak_reserved_bytes)
        yield Prose(
            text=f"With these changes it fits on {plural(needed.world_size, 'rank')} "
            f"({peak} reserved each; the batch of a rank stays, so the global batch grows)."
        )


def _search_notes(fit: Fit) -> Iterator[str]:
    text = f"{plural(fit.simulations, 'simulation')} of rank 0"
    if not fit.complete:
        text += "; the limit ended the search (--max-simulations)"
    yield text
    if fit.kept:
        yield f"kept as written: {', '.join(map(printable, fit.kept))}"
