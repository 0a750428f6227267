"""What became of the gates: a section of the report, and a summary for a CI page."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.model.gate import GateResult
from fsdp_doctor.report.document import Block, Cell, Column, Document, Prose, Section, Table, Tone
from fsdp_doctor.report.markdown import MarkdownRenderer
from fsdp_doctor.report.words import config_value, metric_name, plural, words

_TONES: dict[str, Tone] = {
    "failed": "bad",
    "not_comparable": "bad",
    "unclear": "warn",
    "passed": "good",
}
_SHOWN = 10


def gate_label(result: GateResult) -> str:
    """Return what a gate was held against: metric, phase, category and rank."""
    parts = [metric_name(result.metric)]
    if result.category is not None:
        parts.append(words(result.category))
    if result.phase is not None:
        parts.append(words(result.phase))
    if result.rank is not None:
        parts.append(f"rank {result.rank}")
    return ", ".join(parts)


def gates_section(results: Sequence[GateResult]) -> list[Section]:
    """Return the section on gates, those that fail first; none where there are none."""
    if not results:
        return []
    ordered = sorted(results, key=lambda r: list(_TONES).index(r.outcome))
    table = Table(
        columns=(Column("gate", "code"), Column("on"), Column("outcome"), Column("numbers")),
        rows=tuple(
            (
                Cell(result.gate),
                Cell(gate_label(result)),
                Cell(_outcome(result), _TONES[result.outcome]),
                Cell(result.reason),
            )
            for result in ordered
        ),
    )
    return [Section(title="Gates", blocks=(Prose(text=verdict_line(results)), table))]


def verdict_line(results: Sequence[GateResult]) -> str:
    """Return how many gates failed, cannot be held, are unclear and passed."""
    counts = {outcome: sum(r.outcome == outcome for r in results) for outcome in _TONES}
    told = ", ".join(f"{count} {words(outcome)}" for outcome, count in counts.items() if count)
    return f"{plural(len(results), 'gate')}: {told}."


def _outcome(result: GateResult) -> str:
    unclear = result.fails and result.outcome == "unclear"
    return "unclear (fails)" if unclear else words(result.outcome)


def gate_summary(comparison: Comparison) -> str:
    """Return Markdown for the summary page of a CI job: gates, findings, and what changed."""
    changed = comparison.diff.changed
    findings: tuple[Block, ...] = tuple(
        Prose(text=f"{finding.severity}: {finding.claim}")
        for finding in comparison.findings[:_SHOWN]
    ) or (Prose(text="Nothing got clearly worse or better."),)
    fields: tuple[Block, ...] = (Prose(text="No field changed that has an effect."),)
    if changed:
        rows = tuple(
            (Cell(c.key), Cell(config_value(c.a)), Cell(config_value(c.b))) for c in changed
        )
        columns = (Column("field", "code"), Column("A", "code"), Column("B", "code"))
        fields = (Table(columns=columns, rows=rows),)
    return MarkdownRenderer().render_document(
        Document(
            title=f"{comparison.name_a} -> {comparison.name_b}",
            sections=(
                *gates_section(comparison.gates),
                Section(title="Findings", blocks=findings, level=2),
                Section(title="What changed", blocks=fields, level=2),
            ),
        )
    )
