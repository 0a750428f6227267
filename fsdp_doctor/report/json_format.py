"""JSON: the envelope of every command, and reports for programs.

``report``: ``runs: [{"name", "directory", "manifest", "ranks": [{"rank", "host", "device",
"finished", "exit_code", "signal", "first_step": {"peak_allocated_bytes", "peak_reserved_bytes"},
"steady": {"peak_allocated_bytes", "peak_reserved_bytes", "resident_bytes",
"unused_reserved_bytes"}, "outside_pytorch_bytes", "allocation_retries", "out_of_memory_count",
"phases": [{"phase", "end_allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes"}],
"checkpoint": {"format", "bytes_on_disk", "restored", "phases": [{"phase",
"allocated_before_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "host_before_bytes",
"host_peak_bytes", "time_s"}]}, "anatomy", "time_breakdown"}], "step_time_s": {"median", "p10",
"p90", "count", "slowest_rank"}, "step_times_s": [{"step", "rank", "time_s"}], "phase_times_s":
{phase: {...}}, "loss_finite"}]``.
``manifest`` and ``anatomy`` have the fields of ``fsdp_doctor.model``; ``step_times_s`` holds the
slowest rank of each timed step. Bytes are integers, times seconds, and what is not known is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_doctor import __version__
from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.model.run import RankSeries, Run
from fsdp_doctor.report import facts
from fsdp_doctor.report.document import printable
from fsdp_doctor.report.words import run_labels
from fsdp_doctor.runs.summary import resident_bytes, steady_peak_bytes

JSON_SCHEMA = 1


def encode_envelope(command: str, payload: dict[str, Any], warnings: Sequence[str] = ()) -> str:
    """Return the JSON of a command: schema, command, tool, warnings, then ``payload``.

    Dataclasses in ``payload`` are written as objects; bytes stay integers, unknown values null.
    """
    import msgspec

    envelope = {
        "schema": JSON_SCHEMA,
        "command": command,
        "tool": {"name": "fsdp-doctor", "version": __version__},
        "warnings": list(warnings),
        **payload,
    }
    return msgspec.json.format(msgspec.json.encode(envelope, enc_hook=str), indent=1).decode()


class JsonRenderer:
    """The JSON contract as text."""

    file_extension = ".json"
    is_binary = False

    def render_runs(self, runs: Sequence[Run]) -> str:
        """Return the ``report`` envelope."""
        labels = run_labels(runs)
        warnings = [
            f"{label}: {warning}" if len(runs) > 1 else warning
            for run, label in zip(runs, labels, strict=True)
            for warning in run.manifest.warnings
        ]
        payload = [run_payload(run, label) for run, label in zip(runs, labels, strict=True)]
        return encode_envelope("report", {"runs": payload}, warnings) + "\n"

    def render_comparison(
        self,
        comparison: Comparison,
        runs_a: Sequence[Run],  # noqa: ARG002 (the contract of Renderer)
        runs_b: Sequence[Run],  # noqa: ARG002
    ) -> str:
        """Return the ``compare`` envelope; the runs are not repeated in it."""
        from fsdp_doctor.attribution.payload import comparison_to_payload

        payload = comparison_to_payload(comparison)
        return encode_envelope("compare", payload, comparison.warnings) + "\n"


def run_payload(run: Run, label: str) -> dict[str, Any]:
    """Return a run as the ``report`` command writes it."""
    steps = facts.step_times(run)
    finite, known, _ = facts.loss_facts(run)
    return {
        "name": label,
        "directory": printable(str(run.directory)) if run.directory is not None else None,
        "manifest": run.manifest,
        "ranks": [_rank_payload(series) for series in run.ranks],
        "step_time_s": _spread(steps),
        "step_times_s": [
            {"step": step, "rank": rank, "time_s": time_s}
            for step, (time_s, rank) in zip(sorted(steps), facts.slowest(steps), strict=True)
        ],
        "phase_times_s": {
            phase.value: _spread(times) for phase, times in facts.phase_times(run).items()
        },
        "loss_finite": finite == known if known else None,
    }


def _rank_payload(series: RankSeries) -> dict[str, Any]:
    return {
        "rank": series.rank,
        "host": series.host,
        "device": series.device,
        "finished": series.finished,
        "exit_code": series.exit_code,
        "signal": series.signal,
        "first_step": {
            "peak_allocated_bytes": facts.first_step_peak_bytes(series),
            "peak_reserved_bytes": facts.first_step_peak_bytes(series, "reserved_bytes"),
        },
        "steady": {
            "peak_allocated_bytes": steady_peak_bytes(series),
            "peak_reserved_bytes": steady_peak_bytes(series, counter="reserved_bytes"),
            "resident_bytes": resident_bytes(series),
            "unused_reserved_bytes": facts.unused_reserved_bytes(series),
        },
        "outside_pytorch_bytes": facts.outside_pytorch_bytes(series),
        "allocation_retries": facts.last_known(series, "allocation_retries"),
        "out_of_memory_count": facts.last_known(series, "out_of_memory_count"),
        "phases": [
            {
                "phase": row.phase,
                "end_allocated_bytes": row.end_bytes,
                "peak_allocated_bytes": row.peak_bytes,
                "peak_reserved_bytes": row.reserved_bytes,
            }
            for row in facts.phase_memory(series)
        ],
        "checkpoint": _checkpoint(series),
        "anatomy": series.anatomy,
        "time_breakdown": series.time_breakdown,
    }


def _checkpoint(series: RankSeries) -> dict[str, Any] | None:
    phases = facts.checkpoint_phases(series)
    if not phases:
        return None
    record = series.checkpoint
    return {
        "format": record.format if record else None,
        "bytes_on_disk": record.bytes_on_disk if record else None,
        "restored": record.restored if record else None,
        "phases": [
            {
                "phase": found.phase,
                "allocated_before_bytes": found.before_bytes,
                "peak_allocated_bytes": found.peak_bytes,
                "peak_reserved_bytes": found.reserved_bytes,
                "host_before_bytes": found.host_before_bytes,
                "host_peak_bytes": found.host_peak_bytes,
                "time_s": found.time_s,
            }
            for found in phases
        ],
    }


def _spread(times: dict[int, dict[int, float]]) -> dict[str, float | int | None] | None:
    spread = facts.spread(time_s for time_s, _ in facts.slowest(times))
    if spread is None:
        return None
    slow = facts.most_often_slowest(times)
    return {
        "median": spread.median,
        "p10": spread.p10,
        "p90": spread.p90,
        "count": spread.count,
        "slowest_rank": slow[0] if slow else None,
    }
