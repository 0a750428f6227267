"""What a report says about one or more runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fsdp_doctor.model.run import Run, StepRecord
from fsdp_doctor.report import facts, plots
from fsdp_doctor.report.document import (
    Cell,
    Column,
    Document,
    Facts,
    Footnotes,
    PlotFigure,
    Prose,
    Section,
    Table,
    Tile,
)
from fsdp_doctor.report.run_checkpoint import checkpoint_section
from fsdp_doctor.report.run_failure import failure_blocks
from fsdp_doctor.report.run_memory import memory_sections
from fsdp_doctor.report.run_time import time_sections
from fsdp_doctor.report.words import (
    STATUS_TONES,
    UNKNOWN,
    config_value,
    optional,
    run_labels,
    scalar,
    seconds,
    size_range,
    source_text,
    words,
)
from fsdp_doctor.units import format_bytes, format_seconds


def runs_document(runs: Sequence[Run]) -> Document:
    """Return the report of one run, or of several one after another."""
    notes = Footnotes()
    labels = run_labels(runs)
    if not runs:
        nothing = Section(title="Runs", blocks=(Prose(text="No run was given.", tone="muted"),))
        return Document(title="fsdp-doctor report", sections=(nothing,))
    if len(runs) == 1:
        run = runs[0]
        return Document(
            title=labels[0],
            subtitle=source_text(run.manifest),
            badge=_status(run),
            tiles=_tiles(run),
            sections=(*run_sections(run, notes), *notes.section()),
        )
    sections = [_overview(runs, labels)]
    for run, label in zip(runs, labels, strict=True):
        sections.append(Section(title=f"Run {label}", blocks=()))
        sections += [replace(section, level=2) for section in run_sections(run, notes)]
    return Document(
        title=f"{len(runs)} runs",
        sections=(*sections, *notes.section()),
        subtitle=", ".join(labels),
    )


def run_sections(run: Run, notes: Footnotes) -> list[Section]:
    """Return all sections of one run, a failure first."""
    sections = []
    if run.manifest.failure is not None:
        sections.append(Section(title="What failed", blocks=failure_blocks(run)))
    elif run.manifest.status != "completed":
        text = f"The run's status is {run.manifest.status!r}: it has not, or not yet, ended well."
        sections.append(Section(title="Not completed", blocks=(Prose(text=text, tone="warn"),)))
    sections.append(Section(title="Run", blocks=(_header(run, notes),)))
    sections += memory_sections(run, notes)
    sections += checkpoint_section(run)
    sections += time_sections(run)
    sections += _environment(run)
    return sections


def _status(run: Run) -> Cell:
    status = run.manifest.status
    return Cell(status.upper(), STATUS_TONES.get(status, "plain"))


def _tiles(run: Run) -> tuple[Tile, ...]:
    peaks = facts.spread_over_ranks(run, facts.peak_bytes)
    reserved = facts.spread_over_ranks(run, lambda s: facts.peak_bytes(s, "reserved_bytes"))
    spread = facts.spread(time_s for time_s, _ in facts.slowest(facts.step_times(run)))
    anatomy = facts.anatomy_of(run)
    largest = facts.by_size(anatomy[1].categories)[:1] if anatomy else []
    across = "largest rank" if len(run.ranks) > 1 else ""
    return (
        Tile("peak allocated", format_bytes(peaks[1] if peaks else None), across),
        Tile("peak reserved", format_bytes(reserved[1] if reserved else None), across),
        Tile(
            "peak is in",
            words(anatomy[1].peak_phase) if anatomy else UNKNOWN,
            f"most of it {words(largest[0][0])}" if largest else "",
        ),
        Tile(
            "step time",
            format_seconds(spread.median if spread else None),
            f"{format_seconds(spread.p10)} .. {format_seconds(spread.p90)}" if spread else "",
        ),
    )


def _header(run: Run, notes: Footnotes) -> Facts:
    manifest = run.manifest
    device = manifest.device_name or manifest.device_type
    items = [
        ("name", Cell(manifest.name, "strong")),
        ("status", Cell(manifest.status, STATUS_TONES[manifest.status], _marks(run, notes))),
        (
            "source",
            Cell(source_text(manifest), "warn" if manifest.source == "one_rank" else "plain"),
        ),
        ("device", Cell(device)),
        ("world size", Cell(str(manifest.world_size))),
        ("torch", Cell(optional(_find(manifest.environment, "torch")))),
        ("recorded", Cell(f"{manifest.created}, by fsdp-doctor {manifest.tool_version}")),
        ("steps", Cell(_steps_text(run))),
    ]
    if manifest.sizes is not None:
        sizes = manifest.sizes
        text = f"{sizes.parameters:,} parameters, {format_bytes(sizes.parameter_bytes)} as built"
        items.append(("model", Cell(text)))
    if manifest.tokens_per_step is not None:
        items.append(("tokens per step", Cell(f"{manifest.tokens_per_step:,}")))
    return Facts(items=tuple(items))


def _marks(run: Run, notes: Footnotes) -> tuple[int, ...]:
    return notes.add_all(run.manifest.warnings)


def _steps_text(run: Run) -> str:
    counts: dict[str, int] = {}
    series = facts.first_rank(run)
    for step in series.steps if series else ():
        kind = _kind(step, unfinished=step.step == facts.unfinished_step(run))
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{count} {words(kind)}" for kind, count in counts.items()) or "none"


def _kind(step: StepRecord, *, unfinished: bool) -> str:
    """Return a step's kind; ``warmup`` may only mean that a failed step did not say its kind."""
    if not unfinished:
        return step.kind
    return "unfinished" if step.kind == "warmup" else f"{step.kind} (unfinished)"


def _find(environment: Mapping[str, Any], package: str) -> Any:
    """Return a package's version from an environment, wherever it keeps versions."""
    for value in (environment.get(package), environment.get(f"{package}_version")):
        if isinstance(value, str):
            return value
    for value in environment.values():
        if isinstance(value, Mapping) and isinstance(value.get(package), str):
            return value[package]
    return None


def _overview(runs: Sequence[Run], labels: Sequence[str]) -> Section:
    rows = []
    for run, label in zip(runs, labels, strict=True):
        spread = facts.spread(time_s for time_s, _ in facts.slowest(facts.step_times(run)))
        status = run.manifest.status
        rows.append(
            (
                Cell(label),
                Cell(status, STATUS_TONES[status]),
                Cell(str(run.manifest.world_size)),
                Cell(size_range(facts.spread_over_ranks(run, facts.peak_bytes))),
                seconds(spread.median if spread else None),
            )
        )
    table = Table(
        columns=(
            Column("run", "code"),
            Column("status"),
            Column("ranks", "number"),
            Column("peak allocated", "number"),
            Column("step time", "number"),
        ),
        rows=tuple(rows),
    )
    sides = [(label, [run]) for run, label in zip(runs, labels, strict=True)]
    plot = PlotFigure(title="Time of each step", draw=partial(plots.step_times, sides))
    return Section(title="Overview", blocks=(table, plot))


def _environment(run: Run) -> list[Section]:
    sections = []
    fields = run.manifest.effective_config
    if fields:
        table = Table(
            columns=(Column("field", "code"), Column("value", "code"), Column("source")),
            rows=tuple(
                (
                    Cell(key),
                    Cell(config_value(value), "plain" if value.effective else "muted"),
                    Cell(value.source),
                )
                for key, value in sorted(fields.items())
            ),
        )
        sections.append(
            Section(title="Effective config", blocks=(table,), collapsed=True, only="wide")
        )
    flat = _flatten(run.manifest.environment)
    if flat:
        items = Facts(items=tuple((key, Cell(value)) for key, value in flat))
        sections.append(Section(title="Environment", blocks=(items,), collapsed=True))
    return sections


def _flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    flat: list[tuple[str, str]] = []
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            flat += _flatten(entry, f"{prefix}{key}.")
        elif isinstance(entry, list | tuple):
            flat.append((f"{prefix}{key}", ", ".join(scalar(e) for e in entry)))
        else:
            flat.append((f"{prefix}{key}", UNKNOWN if entry is None else scalar(entry)))
    return flat
