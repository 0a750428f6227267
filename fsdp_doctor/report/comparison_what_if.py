"""Each field's share as simulated, and the points on which an attribution rests."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.model.what_if import WhatIf, WhatIfInteraction, WhatIfMiss, WhatIfShare
from fsdp_doctor.report.document import Block, Cell, Column, Prose, Section, Table, Tone
from fsdp_doctor.report.words import UNKNOWN, level_text, metric_name, words
from fsdp_doctor.units import format_bytes

Group = tuple[str, int | None, str | None]
"""Metric, rank and phase of rows that add up to one difference."""


def group_title(key: Group) -> str:
    """Return e.g. ``peak allocated, backward, rank 0``."""
    name, rank, phase = key
    parts = [metric_name(name)]
    if phase is not None:
        parts.append(words(phase))
    if rank is not None:
        parts.append(f"rank {rank}")
    return ", ".join(parts)


def share_table(comparison: Comparison, key: Group) -> Table | None:
    """Return a row per field of one number, and what is left; None where it was not simulated."""
    what_if = comparison.what_if
    name, rank, phase = key
    if what_if is None or rank is not None:
        return None
    shares = [s for s in what_if.shares if (s.metric, s.phase) == (name, phase)]
    metric = next(
        (m for m in comparison.metrics if (m.name, m.rank, m.phase, m.category) == (*key, None)),
        None,
    )
    if not shares or metric is None:
        return None
    delta = int(metric.delta or 0)
    left = delta - sum(s.value or 0 for s in shares)
    rows = [_share_row(share) for share in shares]
    rows.append(_left_row(left, delta))
    told = [i for i in what_if.interactions if (i.metric, i.phase) == (name, phase)]
    missed = [m for m in what_if.misses if (m.metric, m.phase) == (name, phase)]
    return Table(
        title=group_title(key),
        columns=(
            Column("field", "code"),
            Column("bytes", "number"),
            Column("share", "number"),
            Column("alone in A", "number"),
            Column("missing from B", "number"),
            Column("level"),
            Column("depends on", "code", only="wide"),
        ),
        rows=tuple(rows),
        caption=" ".join(
            (
                f"{format_bytes(metric.a)} -> {format_bytes(metric.b)}, "
                f"change {format_bytes(delta, signed=True)}.",
                _missed_text(missed),
                *([_interaction_text(told)] if told else []),
            )
        ),
    )


def _share_row(share: WhatIfShare) -> tuple[Cell, ...]:
    percent = UNKNOWN if share.share is None else f"{share.share * 100:.1f} %"
    side = " (one side)" if share.one_sided else ""
    return (
        Cell(" + ".join(share.keys)),
        Cell(format_bytes(share.value, signed=True), "strong" if share.value else "muted"),
        Cell(percent),
        Cell(format_bytes(share.first_in, signed=True)),
        Cell(format_bytes(share.last_out, signed=True)),
        Cell(level_text(share.level) + side),
        Cell(", ".join(share.interacts_with) or UNKNOWN),
    )


def _left_row(left: int, delta: int) -> tuple[Cell, ...]:
    blank = Cell(UNKNOWN, "muted")
    tone: Tone = "warn" if left else "muted"
    return (
        Cell("unexplained", tone),
        Cell(format_bytes(left, signed=True), tone),
        Cell(f"{left / delta * 100:.1f} %" if delta else UNKNOWN),
        *(blank,) * 4,
    )


def _missed_text(misses: Sequence[WhatIfMiss]) -> str:
    wrong = [m for m in misses if m.miss]
    if not wrong:
        return "Simulated and measured change are equal to the byte in every category."
    worst = max(wrong, key=lambda m: abs(m.miss))
    total = sum(m.miss for m in misses)
    return (
        f"The simulated change misses the measured one by {total:+d} bytes, at most by "
        f"{worst.miss:+d} in one category ({words(worst.category or 'allocated memory')})."
    )


def _interaction_text(interactions: Sequence[WhatIfInteraction]) -> str:
    told = [f"{' x '.join(i.keys)} {format_bytes(i.value, signed=True)}" for i in interactions[:3]]
    more = len(interactions) - len(told)
    return f"Together beyond each alone: {', '.join(told)}{f', {more} more' if more else ''}."


def evidence_sections(comparison: Comparison) -> list[Section]:
    """Return the points that were simulated: what rows of an attribution rest on."""
    what_if = comparison.what_if
    if what_if is None:
        return []
    blocks: list[Block] = [Prose(text=_how(what_if)), _points_table(what_if)]
    if what_if.not_simulated:
        keys = ", ".join(what_if.not_simulated)
        blocks.append(Prose(text=f"Not simulated, by known effects only: {keys}.", tone="warn"))
    return [Section(title="What the attribution rests on", blocks=tuple(blocks), only="wide")]


def _how(what_if: WhatIf) -> str:
    kind = {
        "factorial": "every combination",
        "two-ended": "each field alone in A and missing from B",
        "screened": "fields screened in groups, then each alone in A and missing from B",
    }[what_if.kind]
    device = "GPU" if what_if.device == "cuda" else "CPU"
    again = (
        " A point is repeated by fsdp-doctor estimate on the spec of A with --set for each line."
        if what_if.device == "cuda"
        else ""
    )
    return (
        f"A and B are the recorded runs; S0, S1, ... were simulated without re-runs, as rank "
        f"{what_if.rank} of {what_if.world_size} on a {device}: {kind}.{again}"
    )


def _points_table(what_if: WhatIf) -> Table:
    return Table(
        columns=(
            Column("point"),
            Column("upon the spec of A", "code"),
            Column("peak allocated", "number"),
            Column("in phase"),
        ),
        rows=tuple(
            (
                Cell(point.id, "strong"),
                Cell("\n".join(point.overrides) or "(A itself)"),
                Cell(point.failure, "warn")
                if point.failure is not None
                else Cell(format_bytes(point.peak_allocated_bytes)),
                Cell(words(point.peak_phase) if point.peak_phase else UNKNOWN),
            )
            for point in what_if.points
        ),
    )
