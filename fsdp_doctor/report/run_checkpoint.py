"""What saving and loading a checkpoint took, on each rank."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import RankSeries, Run
from fsdp_doctor.report import facts
from fsdp_doctor.report.document import Block, Cell, Column, Prose, Section, Table
from fsdp_doctor.report.run_ranks import extreme_ranks
from fsdp_doctor.report.words import UNKNOWN, plural, seconds, size
from fsdp_doctor.units import format_bytes

_NAMES = {Phase.CHECKPOINT_SAVE: "save", Phase.CHECKPOINT_LOAD: "load"}


def checkpoint_section(run: Run) -> list[Section]:
    """Return the section on the checkpoint, or nothing when none was begun."""
    told = [series for series in run.ranks if facts.checkpoint_phases(series)]
    if not told:
        return []
    shown = extreme_ranks(told)
    table = Table(
        columns=(
            Column("rank", "number"),
            Column(""),
            Column("peak allocated", "number"),
            Column("rise", "number"),
            Column("reserved", "number"),
            Column("host peak", "number"),
            Column("its rise", "number"),
            Column("time", "number"),
        ),
        rows=tuple(row for series in shown for row in _rows(series)),
        caption=_caption(told, len(shown)),
    )
    return [Section(title="Checkpoint", blocks=(*_verdict(told), table))]


def _rows(series: RankSeries) -> Iterator[tuple[Cell, ...]]:
    for found in facts.checkpoint_phases(series):
        yield (
            Cell(str(series.rank)),
            Cell(_NAMES[found.phase]),
            size(found.peak_bytes),
            size(_above(found.peak_bytes, found.before_bytes)),
            size(found.reserved_bytes),
            size(found.host_peak_bytes),
            size(_above(found.host_peak_bytes, found.host_before_bytes)),
            seconds(found.time_s),
        )


def _above(peak: int | None, before: int | None) -> int | None:
    return None if peak is None or before is None else peak - before


def _caption(told: list[RankSeries], shown: int) -> str:
    text = (
        "Peaks while saving and while loading, and how far they rise above what was held when the "
        "save began; host: resident set of the process."
    )
    if shown < len(told):
        text += f" The ranks with the largest and smallest peaks of {len(told)}."
    return text


def _verdict(told: list[RankSeries]) -> Iterator[Block]:
    """Say the format and size, and on which ranks the parameters came back."""
    done = [(series.rank, series.checkpoint) for series in told if series.checkpoint is not None]
    if not done:
        yield Prose(text="It did not come to its end.", tone="bad")
        return
    first = done[0][1]
    yield Prose(text=f"Format {first.format}, {format_bytes(first.bytes_on_disk)} on disk.")
    lost = [str(rank) for rank, record in done if record.restored is False]
    if lost:
        ranks = ", ".join(lost)
        text = (
            f"The loaded parameters are not the saved ones on {plural(len(lost), 'rank')}: {ranks}."
        )
        yield Prose(text=text, tone="bad")
    elif len(done) < len(told):
        yield Prose(text=f"Only {len(done)} of {len(told)} ranks came to its end.", tone="bad")
    elif all(record.restored for _, record in done):
        yield Prose(text="Every rank got its parameters back.", tone="good")
    else:
        yield Prose(text=f"Whether parameters came back: {UNKNOWN}.", tone="muted")
