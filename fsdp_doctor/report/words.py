"""Names of things as a reader sees them, and values as cells."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

from fsdp_doctor.model.comparison import Metric
from fsdp_doctor.model.config import ConfigValue
from fsdp_doctor.model.run import Run, RunManifest
from fsdp_doctor.model.work import TimeRange
from fsdp_doctor.report.document import Cell, Tone
from fsdp_doctor.units import format_bytes, format_relative, format_seconds

UNKNOWN = "-"

LEVELS = {
    0: "may",
    1: "predicted",
    2: "re-run one way",
    3: "re-run both ways",
    4: "mechanism seen",
}
LEVEL_MEANINGS = {
    0: "the field touches this category; nothing more is known",
    1: "bytes predicted from the configs agree with the measured ones",
    2: "the field was flipped and re-run in one direction",
    3: "re-run in both directions: adding it to A breaks A, removing it from B mends B",
    4: "both directions, and the mechanism was seen in a memory snapshot",
}
STATUS_TONES: dict[str, Tone] = {
    "completed": "good",
    "failed": "bad",
    "interrupted": "warn",
    "running": "warn",
}
VERDICT_TONES: dict[str, Tone] = {
    "worse": "bad",
    "better": "good",
    "same": "muted",
    "unclear": "warn",
}
_METRIC_NAMES = {
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
    "resident_bytes": "resident",
    "category_bytes": "at the peak",
    "step_time_s": "step time",
    "phase_time_s": "time",
    "tokens_per_s": "tokens/s",
    "outside_pytorch_bytes": "outside PyTorch",
    "allocation_retries": "allocation retries",
    "out_of_memory_bytes": "alive and asked for",
}


def level_text(level: int | None) -> str:
    """Return how a flag's guilt is known, in a word or two."""
    return UNKNOWN if level is None else LEVELS.get(level, f"level {level}")


def words(name: str) -> str:
    """Return an identifier as words."""
    return name.replace("_", " ")


def metric_name(name: str) -> str:
    """Return a metric's name as words, without its unit."""
    known = _METRIC_NAMES.get(name)
    return known or words(name.removesuffix("_bytes").removesuffix("_s"))


def metric_label(metric: Metric) -> str:
    """Return what a metric measures, with phase, category and rank where it has them."""
    text = metric_name(metric.name)
    if metric.category is not None:
        text = words(metric.category) + (f", {text}" if metric.name != "category_bytes" else "")
    if metric.phase is not None:
        text += f", {words(metric.phase)}"
    if metric.rank is not None:
        text += f", rank {metric.rank}"
    return text


def format_value(value: float | None, unit: str, *, signed: bool = False) -> str:
    """Return a metric's value with its unit."""
    if value is None:
        return UNKNOWN
    if unit == "bytes":
        return format_bytes(value, signed=signed)
    if unit == "s":
        return format_seconds(value, signed=signed)
    return f"{value:{'+' if signed and value else ''},.0f}"


def size(value: float | None, tone: Tone = "plain") -> Cell:
    """Return bytes as a cell."""
    return Cell(format_bytes(value), tone)


def seconds(value: float | None) -> Cell:
    """Return seconds as a cell."""
    return Cell(format_seconds(value))


def size_range(bounds: tuple[int, int] | None) -> str:
    """Return the smallest and largest of something, once when they read the same."""
    if bounds is None:
        return UNKNOWN
    low, high = format_bytes(bounds[0]), format_bytes(bounds[1])
    return low if low == high else f"{low} .. {high}"


def time_range(times: TimeRange) -> str:
    """Return a range of seconds that is only a guess."""
    return f"guess: {format_seconds(times.low_s)} .. {format_seconds(times.high_s)}"


def share(part: float, whole: float) -> str:
    """Return a part as percent of a whole."""
    return f"{part / whole * 100:.1f} %" if whole else UNKNOWN


def interval(bounds: tuple[float, float] | None) -> str:
    """Return an interval of relative changes."""
    if bounds is None:
        return UNKNOWN
    return f"{format_relative(bounds[0])} .. {format_relative(bounds[1])}"


def optional(value: Any) -> str:
    """Return a value as text; ``-`` for None."""
    return UNKNOWN if value is None else str(value)


def config_value(value: ConfigValue) -> str:
    """Return a config field's value as text."""
    text = scalar(value.value) if value.set else "(unset)"
    return text if value.effective else f"{text} (inert)"


def scalar(value: Any) -> str:
    """Return a value as YAML would spell it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def plural(count: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def signal_name(number: int) -> str:
    """Return a signal's number and name, where it has one."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def source_text(manifest: RunManifest) -> str:
    """Return where a run's numbers come from, with what that source cannot know."""
    if manifest.source == "one_rank":
        return (
            f"ONE RANK OF {manifest.world_size} (memory is real, "
            "step time lacks communication, no loss)"
        )
    if manifest.source == "simulated":
        return "simulated (no device; no step time, no loss)"
    if manifest.source == "recorded":
        return "read from a job's own records (fewer columns)"
    if len(manifest.ranks) == manifest.world_size:
        return f"real ranks (all {manifest.world_size})"
    return f"real ranks ({len(manifest.ranks)} of {manifest.world_size} recorded)"


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Return a name per run: its own, with its directory and then a number where names collide."""
    names = [run.manifest.name for run in runs]
    if len(set(names)) < len(names):
        names = [
            f"{name} ({run.directory.name})" if run.directory else name
            for name, run in zip(names, runs, strict=True)
        ]
    seen: dict[str, int] = {}
    labels = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        labels.append(f"{name} #{seen[name]}" if names.count(name) > 1 else name)
    return labels
