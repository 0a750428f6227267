"""How a run ended that did not complete."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_doctor.model.run import Failure, RankSeries, Run, StepRecord
from fsdp_doctor.report import facts
from fsdp_doctor.report.document import Block, Card, Cell, Column, Line, Table
from fsdp_doctor.report.run_ranks import rank_end
from fsdp_doctor.report.words import UNKNOWN, optional, plural, signal_name, size, words
from fsdp_doctor.units import format_bytes

MAX_RANKS = 16
"""Ranks named one by one."""


def failure_blocks(run: Run) -> tuple[Block, ...]:
    """Return what happened and what each rank recorded before."""
    failure = run.manifest.failure
    assert failure is not None
    blocks: list[Block] = [failure_card(failure)]
    blocks.append(
        Table(
            title="What was recorded before it ended",
            columns=(
                Column("rank", "number"),
                Column("steps", "number"),
                Column("last step"),
                Column("last phase seen"),
                Column("peak so far", "number"),
                Column("ended"),
            ),
            rows=tuple(
                (
                    Cell(str(series.rank)),
                    Cell(str(len(series.steps))),
                    Cell(optional(series.steps[-1].step if series.steps else None)),
                    Cell(_last_phase(series.steps)),
                    size(facts.peak_bytes(series)),
                    rank_end(series),
                )
                for series in _ranks_of_interest(run, failure)
            ),
        )
    )
    return tuple(blocks)


def _ranks_of_interest(run: Run, failure: Failure) -> list[RankSeries]:
    ranks = sorted(run.ranks, key=lambda s: (s.rank != failure.rank, s.rank))
    return ranks[:MAX_RANKS]


def _last_phase(steps: Sequence[StepRecord]) -> str:
    for step in reversed(steps):
        if step.phases:
            return f"{words(step.phases[-1].phase)} of step {step.step}"
    return UNKNOWN


def failure_card(failure: Failure) -> Card:
    """Return what is known of how a run ended."""
    where = [f"rank {failure.rank}" if failure.rank is not None else "rank not known"]
    if failure.step is not None:
        where.append(f"step {failure.step}" if failure.step >= 0 else "set-up")
    if failure.phase is not None:
        where.append(words(failure.phase))
    badges = []
    if failure.signal is not None:
        badges.append(signal_name(failure.signal))
    if failure.exit_code is not None:
        badges.append(f"exit code {failure.exit_code}")
    lines = [Line(label="message", text=failure.message or UNKNOWN)]
    if failure.requested_bytes is not None:
        lines.append(Line(label="asked for", text=format_bytes(failure.requested_bytes)))
    if failure.frames:
        lines.append(Line(label="frames", text="\n".join(failure.frames), code=True))
    if failure.victims:
        lines.append(Line(label="victims", text=_victims(failure.victims)))
    title = f"{words(failure.kind)}: {', '.join(where)}"
    return Card(title=title, tone="bad", badges=tuple(badges), lines=tuple(lines))


def _victims(ranks: tuple[int, ...]) -> str:
    named = ", ".join(str(rank) for rank in ranks[:MAX_RANKS])
    more = f" and {len(ranks) - MAX_RANKS} more" if len(ranks) > MAX_RANKS else ""
    return f"{plural(len(ranks), 'rank')} died because of it: {named}{more}"
