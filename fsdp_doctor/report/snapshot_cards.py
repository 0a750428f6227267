"""Parts that the reports of one snapshot and of two share."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_doctor.model.finding import Finding
from fsdp_doctor.model.memory import TopAllocation
from fsdp_doctor.model.snapshot import Moment, SnapshotAnalysis
from fsdp_doctor.redact import redact_text
from fsdp_doctor.report.document import Block, Card, Line, Prose, Section, Tone
from fsdp_doctor.report.oom_answer import advice_text
from fsdp_doctor.report.words import words
from fsdp_doctor.units import format_bytes

TONES: dict[str, Tone] = {"error": "bad", "warning": "warn", "note": "plain"}


def findings_section(findings: Sequence[Finding], nothing: str) -> Section:
    """Return the findings, the most likely first."""
    blocks: tuple[Block, ...] = tuple(_card(finding) for finding in findings)
    return Section(title="Findings", blocks=blocks or (Prose(text=nothing, tone="muted"),))


def _card(finding: Finding) -> Card:
    lines = [Line(label="cause", text=f"{finding.cause} (confidence {finding.confidence:.0%})")]
    for evidence in finding.evidence:
        size = "" if evidence.bytes is None else f" [{format_bytes(evidence.bytes)}]"
        lines.append(Line(label="evidence", text=redact_text(evidence.text) + size))
    lines += [Line(label="do", text=advice_text(advice)) for advice in finding.advice]
    return Card(
        title=finding.claim,
        tone=TONES[finding.severity],
        badges=(finding.severity,),
        lines=tuple(lines),
    )


def place_text(moment: Moment) -> str:
    """Return where in the job a moment lies."""
    parts = [] if moment.step is None else [f"step {moment.step}"]
    parts.append("phase not known" if moment.phase == "unknown" else words(moment.phase))
    if moment.unit:
        parts.append(moment.unit)
    if moment.time_s is not None:
        parts.append(f"{moment.time_s:.3f} s after the first event")
    return ", ".join(parts)


def label_of(analysis: SnapshotAnalysis) -> str:
    """Return a short name of a snapshot."""
    name = analysis.path.replace("\\", "/").rpartition("/")[2]
    return name if analysis.rank is None else f"{name} (rank {analysis.rank})"


def allocation_words(top: TopAllocation) -> str:
    """Return a category with what it is for."""
    name = words(top.category)
    return f"{name} ({words(top.subcategory)})" if top.subcategory else name
