"""CSV in long format: one value a row, for spreadsheets and data frames.

Runs: ``run, rank, step, phase, category, metric, unit, value``; step -1 is the set-up. Comparisons
add ``side`` (a, b, delta or attribution), ``verdict``, ``keys`` and ``level``. Cells of what does
not apply, or is not known, are empty; unknown values have no row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.model.memory import Anatomy, MemoryCounters
from fsdp_doctor.model.run import PhaseRecord, RankSeries, Run, StepRecord
from fsdp_doctor.report.document import printable
from fsdp_doctor.report.words import run_labels

COLUMNS = ("run", "rank", "step", "phase", "category", "metric", "unit", "value")
COMPARISON_COLUMNS = ("side", *COLUMNS, "verdict", "keys", "level")
_STEP_UNITS = {
    "step_time_s": "s",
    "loss": "",
    "allocation_retries": "count",
    "out_of_memory_count": "count",
    "device_used_bytes": "bytes",
    "host_rss_bytes": "bytes",
}
_BREAKDOWN = (
    "wall_s",
    "kernel_s",
    "exposed_communication_s",
    "communication_s",
    "copy_s",
    "idle_s",
)
Row = dict[str, Any]


class CsvRenderer:
    """Long-format CSV, through pandas."""

    file_extension = ".csv"
    is_binary = False

    def render_runs(self, runs: Sequence[Run]) -> str:
        """Return every recorded number of the runs."""
        rows = [
            {"run": label, "rank": series.rank, **row}
            for run, label in zip(runs, run_labels(runs), strict=True)
            for series in run.ranks
            for row in _rank_rows(series)
        ]
        return _to_csv(rows, COLUMNS)

    def render_comparison(
        self,
        comparison: Comparison,
        runs_a: Sequence[Run],  # noqa: ARG002 (the contract of Renderer)
        runs_b: Sequence[Run],  # noqa: ARG002
    ) -> str:
        """Return metrics, their differences and the attribution; the runs are not repeated."""
        rows = [*_metric_rows(comparison), *_attribution_rows(comparison)]
        return _to_csv(rows, COMPARISON_COLUMNS)


def _to_csv(rows: list[Row], columns: Sequence[str]) -> str:
    import pandas as pd

    known = [
        {name: printable(v) if isinstance(v, str) else v for name, v in row.items()}
        for row in rows
        if row["value"] is not None
    ]
    # dtype object: integers stay exact, also beside missing ones
    frame = pd.DataFrame(known, columns=list(columns), dtype=object)
    return frame.to_csv(index=False, lineterminator="\n")


def _rank_rows(series: RankSeries) -> Iterator[Row]:
    for record in series.setup:
        yield from _phase_rows(record)
    for step in series.steps:
        for record in step.phases:
            yield from _phase_rows(record)
        yield from _step_rows(step)
    if series.anatomy is not None:
        yield from _anatomy_rows(series.anatomy)
    for item in series.time_breakdown:
        for name in _BREAKDOWN:
            value = getattr(item, name)
            yield {"phase": item.phase, "metric": f"profiled_{name}", "unit": "s", "value": value}


def _phase_rows(record: PhaseRecord) -> Iterator[Row]:
    place = {"step": record.step, "phase": record.phase}
    for when, counters in (("end", record.end), ("peak", record.peak)):
        for counter in fields(MemoryCounters):
            value = getattr(counters, counter.name)
            yield {**place, "metric": f"{when}_{counter.name}", "unit": "bytes", "value": value}
    yield {**place, "metric": "phase_time_s", "unit": "s", "value": record.time_s}


def _step_rows(step: StepRecord) -> Iterator[Row]:
    for name, unit in _STEP_UNITS.items():
        yield {"step": step.step, "metric": name, "unit": unit, "value": getattr(step, name)}


def _anatomy_rows(anatomy: Anatomy) -> Iterator[Row]:
    groups: list[tuple[str, str | None, dict[str, int]]] = [
        ("category_bytes", anatomy.peak_phase.value, anatomy.categories),
        *(("phase_category_bytes", p, a.categories) for p, a in anatomy.phases.items()),
        ("resident_category_bytes", None, anatomy.resident),
    ]
    for metric, phase, categories in groups:
        for category, value in categories.items():
            yield {
                "step": anatomy.step,
                "phase": phase,
                "category": category,
                "metric": metric,
                "unit": "bytes",
                "value": value,
            }


def _metric_rows(comparison: Comparison) -> Iterator[Row]:
    for metric in comparison.metrics:
        shared = {
            "rank": metric.rank,
            "phase": metric.phase,
            "category": metric.category,
            "metric": metric.name,
            "unit": metric.unit,
        }
        yield {"side": "a", "run": comparison.name_a, **shared, "value": metric.a}
        yield {"side": "b", "run": comparison.name_b, **shared, "value": metric.b}
        yield {"side": "delta", **shared, "value": metric.delta, "verdict": metric.verdict}


def _attribution_rows(comparison: Comparison) -> Iterator[Row]:
    for part in comparison.attribution:
        yield {
            "side": "attribution",
            "rank": part.rank,
            "phase": part.phase,
            "category": part.category,
            "metric": part.metric,
            "unit": part.unit,
            "value": part.value,
            "keys": " + ".join(part.keys) or "unexplained",
            "level": part.level,
        }
