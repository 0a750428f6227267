"""What a report says about a comparison: findings first, then the numbers behind them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fsdp_doctor.attribution.moved_peak import find_moved_peak
from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.model.config import ConfigChange, ConfigDiff
from fsdp_doctor.model.finding import Evidence, Finding
from fsdp_doctor.model.run import Run
from fsdp_doctor.report import facts, plots
from fsdp_doctor.report.comparison_attribution import attribution_sections
from fsdp_doctor.report.comparison_basis import basis_section
from fsdp_doctor.report.comparison_metrics import headline_tiles, metric_sections
from fsdp_doctor.report.document import (
    Block,
    Card,
    Cell,
    Column,
    Document,
    Footnotes,
    Line,
    PlotFigure,
    Prose,
    Section,
    Table,
    Tone,
)
from fsdp_doctor.report.gates import gates_section
from fsdp_doctor.report.run_failure import failure_card
from fsdp_doctor.report.words import (
    LEVEL_MEANINGS,
    UNKNOWN,
    config_value,
    level_text,
    run_labels,
    source_text,
    words,
)
from fsdp_doctor.units import format_bytes

_SEVERITY_TONES: dict[str, Tone] = {"error": "bad", "warning": "warn", "note": "plain"}


def comparison_document(
    comparison: Comparison, runs_a: Sequence[Run], runs_b: Sequence[Run]
) -> Document:
    """Return the report of a comparison and of the runs it compares."""
    notes = Footnotes()
    told = {mismatch.text for mismatch in comparison.mismatches}
    notes.add_all(tuple(warning for warning in comparison.warnings if warning not in told))
    sections = [
        *gates_section(comparison.gates),
        _findings_section(comparison.findings),
        *_failed_sections(runs_a, runs_b),
        _sides_section(comparison, runs_a, runs_b),
        _changes_section(comparison.diff),
        *metric_sections(comparison, runs_a, runs_b, notes),
        *attribution_sections(comparison, notes, find_moved_peak(runs_a, runs_b)),
        *_plots_section(comparison, runs_a, runs_b),
        *_quiet_changes(comparison.diff),
        *basis_section(comparison.basis),
    ]
    return Document(
        title=f"{comparison.name_a} -> {comparison.name_b}",
        subtitle="A is the first, B the second; changes are B - A",
        tiles=headline_tiles(comparison),
        sections=(*sections, *notes.section()),
    )


def _findings_section(findings: Sequence[Finding]) -> Section:
    blocks: tuple[Block, ...] = tuple(_finding_card(finding) for finding in findings)
    if not blocks:
        blocks = (Prose(text="Nothing got clearly worse or better.", tone="muted"),)
    return Section(title="Findings", blocks=blocks)


def _finding_card(finding: Finding) -> Card:
    badges: list[str] = [finding.severity]
    if finding.level is not None:
        badges.append(level_text(finding.level))
    lines = []
    if finding.flags:
        lines.append(Line(label="flags", text=" + ".join(finding.flags)))
    if finding.level is not None:
        known = LEVEL_MEANINGS.get(finding.level, f"level {finding.level}")
        lines.append(Line(label="how sure", text=f"{level_text(finding.level)} ({known})"))
    lines += [Line(label="evidence", text=evidence_text(e)) for e in finding.evidence]
    if finding.rests_on:
        lines.append(Line(label="rests on", text="; ".join(finding.rests_on)))
    for advice in finding.advice:
        saves = advice.saves_text or (
            f"saves {format_bytes(advice.saves_bytes)}" if advice.saves_bytes is not None else ""
        )
        cost = f"cost: {advice.cost}" if advice.cost else ""
        extra = "; ".join(part for part in (saves, cost) if part)
        lines.append(Line(label="do", text=advice.change + (f" ({extra})" if extra else "")))
    return Card(
        title=finding.claim,
        tone=_SEVERITY_TONES[finding.severity],
        badges=tuple(badges),
        lines=tuple(lines),
    )


def evidence_text(evidence: Evidence) -> str:
    """Return evidence with its place."""
    place = []
    if evidence.file is not None:
        line = f":{evidence.line}" if evidence.line is not None else ""
        place.append(f"{evidence.file}{line}")
    if evidence.rank is not None:
        place.append(f"rank {evidence.rank}")
    if evidence.step is not None:
        place.append(f"step {evidence.step}")
    if evidence.bytes is not None:
        place.append(format_bytes(evidence.bytes, signed=True))
    return evidence.text + (f" [{', '.join(place)}]" if place else "")


def _failed_sections(runs_a: Sequence[Run], runs_b: Sequence[Run]) -> list[Section]:
    blocks: list[Block] = []
    for side, runs in (("A", runs_a), ("B", runs_b)):
        for run, label in zip(runs, run_labels(runs), strict=True):
            if run.manifest.failure is not None:
                blocks += [
                    Prose(text=f"{side}: {label} did not complete.", tone="bad"),
                    failure_card(run.manifest.failure),
                ]
    return [Section(title="Failed runs", blocks=tuple(blocks))] if blocks else []


def _sides_section(comparison: Comparison, runs_a: Sequence[Run], runs_b: Sequence[Run]) -> Section:
    rows = []
    for side, name, runs in (
        ("A", comparison.name_a, runs_a),
        ("B", comparison.name_b, runs_b),
    ):
        manifest = runs[0].manifest if runs else None
        rows.append(
            (
                Cell(side, "strong"),
                Cell(name),
                Cell(str(len(runs))),
                Cell(str(manifest.world_size) if manifest else UNKNOWN),
                Cell((manifest.device_name or manifest.device_type) if manifest else UNKNOWN),
                Cell(source_text(manifest) if manifest else UNKNOWN),
            )
        )
    table = Table(
        columns=(
            Column("side"),
            Column("name", "code"),
            Column("launches", "number"),
            Column("world size", "number"),
            Column("device"),
            Column("source", only="wide"),
        ),
        rows=tuple(rows),
    )
    caveats: tuple[Block, ...] = tuple(
        Prose(text=f"{words(one.what)} differs ({one.a} -> {one.b}): {one.meaning}.", tone="warn")
        for one in comparison.mismatches
    )
    if any(run.manifest.source == "one_rank" for run in (*runs_a, *runs_b)):
        text = (
            "Recorded with one rank alone: memory is real, step time lacks communication, no loss."
        )
        caveats = (*caveats, Prose(text=text, tone="warn"))
    return Section(title="What is compared", blocks=(table, *caveats))


def _changes_section(diff: ConfigDiff) -> Section:
    changes = [(c, UNKNOWN) for c in diff.changed] + [(c, "?") for c in diff.unknown]
    counted = Prose(
        text=(
            f"Only look changed: {len(diff.cosmetic)}. Written down without effect: "
            f"{len(diff.inert)}. Of unknown effect: {len(diff.unknown)}."
        ),
        tone="muted",
    )
    if not changes:
        same = Prose(text="No field changed that has an effect.")
        return Section(title="What changed", blocks=(same, counted))
    return Section(title="What changed", blocks=(_change_table(changes), counted))


def _change_table(changes: Sequence[tuple[ConfigChange, str]]) -> Table:
    """Return the fields that differ, each with the word for an effect that is not known."""
    return Table(
        columns=(
            Column("field", "code"),
            Column("A", "code"),
            Column("B", "code"),
            Column("memory"),
            Column("step time"),
            Column("why", only="wide"),
        ),
        rows=tuple(
            (
                Cell(change.key),
                Cell(config_value(change.a)),
                Cell(config_value(change.b)),
                Cell("\n".join(f"{words(e.category)} {e.direction}" for e in change.effects) or no),
                Cell(change.step_time.direction if change.step_time else no),
                Cell("\n".join(dict.fromkeys(e.reason for e in change.effects))),
            )
            for change, no in changes
        ),
    )


def _quiet_changes(diff: ConfigDiff) -> list[Section]:
    blocks: list[Block] = []
    if diff.cosmetic:
        blocks.append(
            Table(
                title="Only looks changed",
                columns=(Column("field", "code"), Column("A", "code"), Column("B", "code")),
                rows=tuple(
                    (Cell(c.key), Cell(config_value(c.a)), Cell(config_value(c.b)))
                    for c in diff.cosmetic
                ),
            )
        )
    if diff.inert:
        blocks.append(
            Table(
                title="Written down without effect",
                columns=(Column("field", "code"), Column("side"), Column("reason")),
                rows=tuple((Cell(f.key), Cell(f.side), Cell(f.reason)) for f in diff.inert),
            )
        )
    title = "Differences without effect"
    return [Section(title=title, blocks=tuple(blocks), collapsed=True)] if blocks else []


def _plots_section(
    comparison: Comparison, runs_a: Sequence[Run], runs_b: Sequence[Run]
) -> list[Section]:
    blocks: list[Block] = []
    name_a, name_b = plots.side_names(comparison)
    sides = [(name_a, runs_a), (name_b, runs_b)]
    anatomies = [
        (name, found[1])
        for name, runs in sides
        for run in runs[:1]
        if (found := facts.anatomy_of(run))
    ]
    if any(anatomy.phases for _, anatomy in anatomies):
        draw = partial(plots.phase_categories, anatomies)
        blocks.append(PlotFigure(title="Peak of each phase by category", draw=draw))
    firsts = [(name, run) for name, runs in sides for run in runs[:1]]
    if any(len(run.ranks) > 1 for _, run in firsts):
        blocks.append(PlotFigure(title="Peak of each rank", draw=partial(plots.rank_peaks, firsts)))
    if any(facts.has_step_times(run) for _, runs in sides for run in runs):
        blocks.append(PlotFigure(title="Time of each step", draw=partial(plots.step_times, sides)))
    return [Section(title="Plots", blocks=tuple(blocks))] if blocks else []
