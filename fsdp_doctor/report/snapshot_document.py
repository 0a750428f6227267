"""What a report says about a memory snapshot, or about one of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fsdp_doctor.model.snapshot import OomEvent, SnapshotAnalysis
from fsdp_doctor.redact import redact_text
from fsdp_doctor.report import snapshot_plots
from fsdp_doctor.report.document import (
    Cell,
    Column,
    Document,
    Facts,
    Footnotes,
    PlotFigure,
    Section,
    Table,
    Tile,
)
from fsdp_doctor.report.facts import by_size
from fsdp_doctor.report.snapshot_cards import findings_section, label_of, place_text
from fsdp_doctor.report.snapshot_replays import replay_section
from fsdp_doctor.report.snapshot_tables import (
    growth_section,
    space_sections,
    steps_section,
    tops_section,
)
from fsdp_doctor.report.words import UNKNOWN, share, size, words
from fsdp_doctor.units import format_bytes

_VERDICTS = {
    "full": "nothing cached fits and the device has no room: the memory is full",
    "fragmented": "enough is cached, but in pieces that are too small",
    "combined": "cached pieces and the device's rest together would do, neither does alone",
    "limit": "the device has room, a limit of the process does not",
    "other_pool": "a fitting piece belongs to another stream or a private pool",
    "fitting": "a fitting piece was cached: an allocator limit, or events are missing",
}


def snapshots_document(analyses: Sequence[SnapshotAnalysis], shown: SnapshotAnalysis) -> Document:
    """Return the report of ``shown``, beside the other ranks."""
    notes = Footnotes()
    notes.add_all(shown.warnings)
    focus = shown.focus
    oom = shown.oom
    sections = [findings_section(shown.findings, "Nothing stands out.")]
    if oom is not None:
        sections += [request_section(shown, oom), *replay_section(shown)]
    if len(analyses) > 1:
        sections.append(ranks_section(analyses, shown))
    sections += [
        Section(title="Snapshot", blocks=(_header(shown),)),
        categories_section(shown),
        *tops_section(shown),
        *steps_section(shown),
        *growth_section(shown),
        *space_sections(shown),
    ]
    largest = by_size(focus.categories)[:1]
    return Document(
        title=label_of(shown),
        subtitle=f"memory snapshot of device {shown.device}, {shown.format}",
        badge=Cell("OUT OF MEMORY", "bad") if oom else None,
        tiles=(
            Tile("peak allocated", format_bytes(shown.peak.allocated_bytes)),
            Tile("peak reserved", format_bytes(shown.peak_reserved_bytes)),
            Tile("failed in" if oom else "peak is in", place_text(focus).rpartition(", ")[0]),
            Tile("most of it", words(largest[0][0]) if largest else UNKNOWN),
        ),
        sections=(*sections, *notes.section()),
    )


def request_section(shown: SnapshotAnalysis, oom: OomEvent) -> Section:
    """Return the refused request beside what was free, where, and why none of it served."""
    focus = shown.focus
    pool = "" if oom.pool == (0, 0) else f", private pool {oom.pool}"
    items = [
        ("asked for", size(oom.requested_bytes, "strong")),
        ("asked of the driver", size(oom.driver_bytes)),
        ("free on the device", size(oom.device_free_bytes)),
        ("allocated", size(focus.allocated_bytes)),
        ("active (also waiting for streams)", size(focus.active_bytes)),
        ("reserved", size(focus.reserved_bytes)),
        ("free where it may go", size(oom.free_bytes)),
        ("largest piece of that", size(oom.largest_free_bytes)),
        ("largest free piece elsewhere", size(oom.elsewhere_bytes)),
        ("stream", Cell(f"{oom.stream:#x}{pool}" if oom.stream else f"default{pool}")),
        ("where", Cell(place_text(focus))),
        ("verdict", Cell(_VERDICTS[oom.verdict], "bad")),
    ]
    if oom.count > 1:
        items.append(("refused requests", Cell(f"{oom.count}; this is the last")))
    if oom.frames:
        text = "\n".join(redact_text(frame) for frame in oom.frames[:6])
        items.append(("stack", Cell(text)))
    return Section(title="The request that failed", blocks=(Facts(items=tuple(items)),))


def ranks_section(analyses: Sequence[SnapshotAnalysis], shown: SnapshotAnalysis) -> Section:
    """Return one row for each rank, the one shown first."""
    rows = tuple(
        (
            Cell(UNKNOWN if a.rank is None else str(a.rank), "strong" if a is shown else "plain"),
            size(a.peak.allocated_bytes),
            size(a.peak_reserved_bytes),
            size(a.oom.requested_bytes if a.oom else None, "bad" if a.oom else "plain"),
            Cell(words(a.focus.phase)),
            Cell(a.findings[0].cause if a.findings else UNKNOWN),
        )
        for a in sorted(analyses, key=lambda a: (a is not shown, a.oom is None, a.rank or 0))[:32]
    )
    columns = (
        Column("rank", "number"),
        Column("peak allocated", "number"),
        Column("peak reserved", "number"),
        Column("refused", "number"),
        Column("in"),
        Column("first cause"),
    )
    caption = f"{len(analyses)} snapshots; the rest of the report is about {label_of(shown)}."
    return Section(title="Ranks", blocks=(Table(columns=columns, rows=rows, caption=caption),))


def _header(shown: SnapshotAnalysis) -> Facts:
    changed = [
        f"{key}={value}"
        for key, value in shown.settings.items()
        if key in ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments", "max_split_size")
        and value not in ("", False, -1)
    ]
    items = [
        ("file", Cell(redact_text(shown.path))),
        ("rank", Cell(UNKNOWN if shown.rank is None else str(shown.rank))),
        ("written by", Cell(shown.format)),
        ("events", Cell(f"{shown.events:,}")),
        ("steps seen", Cell(str(len(shown.steps)) if shown.steps else UNKNOWN)),
        ("peak allocated", size(shown.peak.allocated_bytes, "strong")),
        ("peak is in", Cell(place_text(shown.peak))),
        ("reserved at the peak", size(shown.peak.reserved_bytes)),
        ("peak reserved", size(shown.peak_reserved_bytes)),
        ("allocator settings", Cell(redact_text(", ".join(changed)) or "default")),
    ]
    return Facts(items=tuple(items))


def categories_section(shown: SnapshotAnalysis) -> Section:
    """Return what filled the memory at the moment of interest, and over time around it."""
    focus = shown.focus
    where = "when the request failed" if shown.oom else "at the peak"
    rows = [
        (
            Cell(words(name), color=name),
            size(value),
            Cell(share(value, focus.allocated_bytes)),
            Cell("", bar=value / max(focus.allocated_bytes, 1), color=name),
        )
        for name, value in by_size(focus.categories)
    ]
    rows.append((Cell("all", "strong"), size(focus.allocated_bytes, "strong"), Cell(""), Cell("")))
    table = Table(
        columns=(
            Column("category"),
            Column("bytes", "number"),
            Column("share", "number"),
            Column("", "bar"),
        ),
        rows=tuple(rows),
        caption=f"Allocated {where}: {place_text(focus)}.",
    )
    if shown.timeline is None:
        return Section(title="What filled the memory", blocks=(table,))
    plot = PlotFigure(
        title="Memory over time by category",
        draw=partial(snapshot_plots.timeline, shown.timeline, "failed" if shown.oom else "peak"),
        caption="The step of the moment and the two before it; the line is reserved memory.",
    )
    return Section(title="What filled the memory", blocks=(table, plot))
