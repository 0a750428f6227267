"""What a report says about other allocator settings, replayed on a snapshot."""

from __future__ import annotations

from fsdp_doctor.model.replay import AllocatorReplay, WhatIf
from fsdp_doctor.model.snapshot import SnapshotAnalysis
from fsdp_doctor.report.document import Block, Cell, Column, Prose, Section, Table, Tone
from fsdp_doctor.report.words import UNKNOWN, plural, size
from fsdp_doctor.units import format_bytes

_TONES: dict[str, Tone] = {"fits": "good", "fails": "bad", "unknown": "muted"}


def replay_section(shown: SnapshotAnalysis) -> list[Section]:
    """Return what would have served the refused request; nothing where none was refused."""
    replay = shown.replay
    if replay is None:
        return []
    table = Table(
        columns=(
            Column("setting", "code"),
            Column("served"),
            Column("to spare", "number"),
            Column("peak reserved", "number"),
        ),
        rows=tuple(_row(change) for change in replay.changes),
        caption=f"{plural(replay.events, 'event')} up to the refused request, replayed through a "
        "model of the caching allocator.",
    )
    blocks: list[Block] = [table, *(Prose(text=text) for text in replay_texts(replay))]
    return [Section(title="Would other settings have served it?", blocks=tuple(blocks))]


def _row(change: WhatIf) -> tuple[Cell, ...]:
    words = {"fits": "yes", "fails": "no", "unknown": "not known"}[change.outcome]
    reason = f": {change.reason}" if change.reason else ""
    margin = UNKNOWN
    if change.margin_bytes is not None:
        margin = format_bytes(change.margin_bytes, signed=change.margin_bytes < 0)
    return (
        Cell(change.setting, "strong" if change.setting == "as it ran" else "plain"),
        Cell(words + reason, _TONES[change.outcome]),
        Cell(margin),
        size(change.peak_reserved_bytes),
    )


def replay_texts(replay: AllocatorReplay) -> list[str]:
    """Return what the table leaves open, a sentence each."""
    least = "at least " if replay.capacity_is_least else ""
    texts = [
        f"This process could reserve {least}{format_bytes(replay.capacity_bytes)}; blocks in use "
        f"and the request take {format_bytes(replay.floor_bytes)}, whatever the settings."
    ]
    ran = replay.changes[0]
    if ran.outcome == "fails" and ran.margin_bytes is not None:
        need = replay.capacity_bytes - ran.margin_bytes
        texts.append(
            "A device that leaves PyTorch "
            f"{format_bytes(need)} ({format_bytes(-ran.margin_bytes)} more) "
            "would have served this request with the settings as they are."
        )
    if replay.rest_of_step_bytes:
        texts.append(
            f"Earlier steps went on to {format_bytes(replay.rest_of_step_bytes)} more than was "
            "allocated here: with less than that to spare the step fails later."
        )
    elif replay.rest_of_step_bytes is None:
        texts.append("No step was completed: what the rest of the step needs is not known.")
    if replay.assumed_bytes:
        texts.append(
            f"{format_bytes(replay.assumed_bytes)} are older than the replay; under another layout "
            "they are taken to lie side by side, which flatters it."
        )
    return texts
