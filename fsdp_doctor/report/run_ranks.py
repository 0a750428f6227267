"""The ranks of a run beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fsdp_doctor.model.run import RankSeries, Run
from fsdp_doctor.report import facts, plots
from fsdp_doctor.report.document import Cell, Column, PlotFigure, Section, Table
from fsdp_doctor.report.words import optional, signal_name, size
from fsdp_doctor.runs.summary import resident_bytes

MAX_RANKS = 16
"""Ranks listed one by one; beyond, only those with the largest and smallest peaks."""


def ranks_section(run: Run) -> Section:
    """Return every rank's peaks, or the extremes of many ranks."""
    shown, many = extreme_ranks(run.ranks), len(run.ranks)
    half = MAX_RANKS // 2
    caption = (
        ""
        if len(shown) == many
        else f"The {half} largest and {half} smallest peaks of {many} ranks."
    )
    table = Table(
        columns=(
            Column("rank", "number"),
            Column("peak allocated", "number"),
            Column("peak reserved", "number"),
            Column("resident", "number"),
            Column("outside", "number"),
            Column("retries", "number"),
            Column("ended"),
            Column("host", "code", only="wide"),
            Column("device", only="wide"),
        ),
        rows=tuple(_rank_row(series) for series in shown),
        caption=caption,
    )
    plot = PlotFigure(title="Peak of each rank", draw=partial(plots.rank_peaks, [("", run)]))
    return Section(title="Ranks", blocks=(plot, table))


def extreme_ranks(ranks: Sequence[RankSeries]) -> list[RankSeries]:
    """Return all ranks, or of many those with the largest and smallest peaks, by number."""
    ranked = sorted(ranks, key=lambda s: (-(facts.peak_bytes(s) or 0), s.rank))
    half = MAX_RANKS // 2
    shown = ranked if len(ranked) <= MAX_RANKS else ranked[:half] + ranked[-half:]
    return sorted(shown, key=lambda series: series.rank)


def _rank_row(series: RankSeries) -> tuple[Cell, ...]:
    return (
        Cell(str(series.rank)),
        size(facts.peak_bytes(series)),
        size(facts.peak_bytes(series, "reserved_bytes")),
        size(resident_bytes(series)),
        size(facts.outside_pytorch_bytes(series)),
        Cell(optional(facts.last_known(series, "allocation_retries"))),
        rank_end(series),
        Cell(optional(series.host)),
        Cell(optional(series.device)),
    )


def rank_end(series: RankSeries) -> Cell:
    """Return how a rank ended, as far as it is known."""
    if series.signal is not None:
        return Cell(signal_name(series.signal), "bad")
    if series.exit_code:
        return Cell(f"exit {series.exit_code}", "bad")
    if series.finished:
        return Cell("finished", "good")
    return Cell("no end record", "warn")
