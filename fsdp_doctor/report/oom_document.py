"""What a report says about a job that died: the answer in five lines, then the evidence."""

from __future__ import annotations

from functools import partial
from typing import Any

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.finding import Finding
from fsdp_doctor.postmortem import PostMortem, postmortem_payload
from fsdp_doctor.report import oom_plots
from fsdp_doctor.report.base import DocumentRenderer, renderer_for
from fsdp_doctor.report.document import (
    Block,
    Card,
    Cell,
    Document,
    Line,
    PlotFigure,
    Prose,
    Section,
    Tile,
)
from fsdp_doctor.report.json_format import encode_envelope
from fsdp_doctor.report.oom_answer import advice_text, answer_lines, failure_title
from fsdp_doctor.report.oom_clean import Cleaner, cleaned
from fsdp_doctor.report.oom_snapshot import snapshot_sections
from fsdp_doctor.report.oom_tables import failures_table, history_table, numbers_facts
from fsdp_doctor.report.words import optional, plural
from fsdp_doctor.units import format_bytes

MAX_FRAMES = 14


def render_postmortem(result: PostMortem, fmt: str, **style: Any) -> str:
    """Return the report of a post-mortem in a format. Raises InputError for CSV."""
    if fmt == "json":
        return encode_envelope("oom", postmortem_payload(result), result.warnings) + "\n"
    if fmt == "csv":
        raise InputError("no CSV of a post-mortem", hint="use --json, or .html, .md, .txt")
    renderer = renderer_for(fmt, **style)
    assert isinstance(renderer, DocumentRenderer)
    cleaner = Cleaner(result, for_others=fmt in ("html", "markdown"))
    return renderer.render_document(cleaned(postmortem_document(result, cleaner), cleaner))


def postmortem_document(result: PostMortem, cleaner: Cleaner) -> Document:
    """Return the report; ``cleaner`` takes out what others should not read."""
    clean = cleaner.text
    sections = [
        Section(
            title="Answer",
            blocks=tuple(Prose(text=clean(line)) for line in answer_lines(result)),
        ),
        _findings_section(result, cleaner),
        *_failure_section(result, cleaner),
        *snapshot_sections(result),
        *_all_failures(result, cleaner),
        *_history(result),
        *_warnings(result, cleaner),
    ]
    return Document(
        title=clean(failure_title(result)),
        subtitle=_subtitle(result),
        tiles=_tiles(result),
        sections=tuple(sections),
    )


def _subtitle(result: PostMortem) -> str:
    logs = result.logs
    parts = []
    if logs.files:
        parts = [plural(logs.files, "file"), plural(logs.lines, "line"), format_bytes(logs.bytes)]
    if logs.history.lines:
        parts.append(plural(logs.history.lines, "iteration or memory line"))
    if result.runs:
        parts.append(plural(result.runs, "recorded run"))
    if result.snapshots:
        parts.append(plural(len(result.snapshots), "memory snapshot"))
    return "from " + ", ".join(parts)


def _tiles(result: PostMortem) -> tuple[Tile, ...]:
    failure = result.triage.primary
    if failure is None:
        return ()
    tiles = [
        Tile("first to fail", f"rank {optional(failure.rank)}", failure.phase.replace("_", " "))
    ]
    if failure.requested_bytes is not None:
        tiles.append(Tile("asked for", format_bytes(failure.requested_bytes)))
    if failure.allocated_bytes is not None:
        detail = f"of {format_bytes(failure.total_bytes)}" if failure.total_bytes else ""
        tiles.append(Tile("allocated", format_bytes(failure.allocated_bytes), detail))
    if result.findings:
        first = result.findings[0]
        tiles.append(Tile("cause", first.cause, f"confidence {first.confidence:.0%}"))
    return tuple(tiles)


def _findings_section(result: PostMortem, cleaner: Cleaner) -> Section:
    blocks: list[Block] = [
        _card(finding, cleaner, {found.path for found in result.snapshots}, full=index < 2)
        for index, finding in enumerate(result.findings)
    ]
    if not blocks:
        blocks.append(Prose(text=result.verdict["text"], tone="muted"))
    if result.verdict["decide"]:
        blocks.append(Prose(text=f"What would decide: {result.verdict['decide']}."))
    return Section(title="Causes, most likely first", blocks=tuple(blocks))


def _card(finding: Finding, cleaner: Cleaner, snapshots: set[str], *, full: bool) -> Card:
    """Return a finding; of the less likely only the first advice."""
    lines = []
    for evidence in finding.evidence:
        place = "snapshot" if evidence.file in snapshots else None
        place = place or cleaner.place(evidence.file, evidence.line)
        size = format_bytes(evidence.bytes) if evidence.bytes is not None else ""
        extra = ", ".join(part for part in (place, size) if part)
        lines.append(
            Line(
                label="evidence",
                text=cleaner.text(evidence.text) + (f" [{extra}]" if extra else ""),
            )
        )
    if finding.flags:
        lines.append(Line(label="flags", text=cleaner.text(", ".join(finding.flags))))
    lines += [
        Line(label="do", text=advice_text(advice))
        for advice in finding.advice[: None if full else 1]
    ]
    return Card(
        title=cleaner.text(finding.claim),
        tone="bad" if finding.severity == "error" else "plain",
        badges=(finding.cause, f"confidence {finding.confidence:.0%}"),
        lines=tuple(lines),
    )


def _failure_section(result: PostMortem, cleaner: Cleaner) -> list[Section]:
    failure = result.triage.primary
    if failure is None:
        return []
    blocks: list[Block] = [numbers_facts(failure, cleaner)]
    if failure.frames:
        shown = [cleaner.text(frame) for frame in failure.frames[:MAX_FRAMES]]
        title = "Frames, innermost first"
        blocks.append(Card(title=title, lines=(Line(label="", text="\n".join(shown), code=True),)))
    return [Section(title="The first failure", blocks=tuple(blocks))]


def _all_failures(result: PostMortem, cleaner: Cleaner) -> list[Section]:
    if len(result.triage.failures) < 2:
        return []
    table = failures_table(result, cleaner)
    return [Section(title="All failures", blocks=(table,))]


def _history(result: PostMortem) -> list[Section]:
    history = result.logs.history
    if not any(one.lines for one in history.ranks.values()):
        return []
    blocks: list[Block] = [history_table(history)]
    if any(one.memory_steps for one in history.ranks.values()):
        draw = partial(oom_plots.memory_over_steps, history, result.triage.primary)
        blocks.append(PlotFigure(title="Memory over the steps", draw=draw))
    if any(len(one.times_s) > 1 for one in history.ranks.values()):
        draw = partial(oom_plots.times_over_steps, history)
        blocks.append(PlotFigure(title="Step time", draw=draw))
    return [Section(title="What the job printed before", blocks=tuple(blocks))]


def _warnings(result: PostMortem, cleaner: Cleaner) -> list[Section]:
    if not result.warnings:
        return []
    cells = [Cell(cleaner.text(warning)) for warning in result.warnings[:20]]
    return [Section(title="Notes", blocks=tuple(Prose(text=cell.text) for cell in cells))]
