"""Reports of snapshots in every format.

``report --json``: ``snapshots: [{"path", "rank", "device", "format", "events", "peak", "failure",
"end", "steps", "timeline", "space", "oom", "growth", "findings", ...}]`` with the fields of
``fsdp_doctor.model.snapshot``, ``findings`` of the rank that matters most, ``shown`` its path.
``compare --json``: the contract's ``metrics``, ``changed`` (allocator settings), ``findings``, and
``aligned``, ``categories``, ``stacks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.comparison import Metric, Verdict
from fsdp_doctor.model.snapshot import SnapshotAnalysis, SnapshotComparison
from fsdp_doctor.redact import redact
from fsdp_doctor.report.base import DocumentRenderer, renderer_for
from fsdp_doctor.report.document import Document
from fsdp_doctor.report.json_format import encode_envelope


def render_snapshots(
    analyses: Sequence[SnapshotAnalysis], shown: SnapshotAnalysis, fmt: str, **options: Any
) -> str:
    """Return the report of one snapshot, or of the ranks of a job around ``shown``."""
    if fmt == "json":
        payload = {"shown": shown.path, "snapshots": list(analyses), "findings": shown.findings}
        return _envelope("report", payload, shown.warnings)
    from fsdp_doctor.report.snapshot_document import snapshots_document

    return _document(snapshots_document(analyses, shown), fmt, options)


def render_snapshot_comparison(comparison: SnapshotComparison, fmt: str, **options: Any) -> str:
    """Return the report of two snapshots side by side."""
    if fmt == "json":
        return _envelope("compare", comparison_payload(comparison), comparison.warnings)
    from fsdp_doctor.report.snapshot_comparison import comparison_document

    return _document(comparison_document(comparison), fmt, options)


def _document(document: Document, fmt: str, options: dict[str, Any]) -> str:
    renderer = renderer_for(fmt, **options)
    if not isinstance(renderer, DocumentRenderer):
        raise InputError(f"no {fmt} of snapshots", hint="json has every number")
    return renderer.render_document(document)


def _envelope(command: str, payload: dict[str, Any], warnings: Sequence[str]) -> str:
    import msgspec

    plain = redact(msgspec.to_builtins(payload))
    return encode_envelope(command, plain, [redact(warning) for warning in warnings]) + "\n"


def comparison_payload(comparison: SnapshotComparison) -> dict[str, Any]:
    """Return the JSON of ``compare`` for two snapshots."""
    a, b = comparison.a, comparison.b
    return {
        "a": {"name": a.path, "format": "snapshot", "framework": None, "version": a.format},
        "b": {"name": b.path, "format": "snapshot", "framework": None, "version": b.format},
        "aligned": comparison.aligned,
        "metrics": metrics_of(comparison),
        "changed": settings_changed(comparison),
        "cosmetic": [],
        "inert": [],
        "unknown": [],
        "attribution": [],
        "unexplained": [],
        "categories": comparison.categories,
        "stacks": [
            {"what": s.what, "delta_bytes": s.delta_bytes, "change": s} for s in comparison.stacks
        ],
        "findings": comparison.findings,
    }


def settings_changed(comparison: SnapshotComparison) -> list[dict[str, Any]]:
    """Return the allocator settings that differ."""
    a, b = comparison.a.settings, comparison.b.settings
    return [
        {"key": f"allocator.{key}", "a": _value(a, key), "b": _value(b, key)}
        for key in sorted({**a, **b})
        if a.get(key) != b.get(key)
    ]


def _value(settings: dict[str, Any], key: str) -> dict[str, Any]:
    return {
        "set": key in settings,
        "value": settings.get(key),
        "source": "snapshot",
        "effective": True,
        "reason": None,
    }


def metrics_of(comparison: SnapshotComparison) -> list[Metric]:
    """Return the numbers of both sides as ``compare`` writes them."""
    a, b = comparison.a, comparison.b
    moment_a, moment_b = comparison.moment_a, comparison.moment_b
    found = [
        _metric("peak_allocated_bytes", None, a.peak.allocated_bytes, b.peak.allocated_bytes),
        _metric("peak_reserved_bytes", None, a.peak_reserved_bytes, b.peak_reserved_bytes),
        _metric(
            "aligned_allocated_bytes", None, moment_a.allocated_bytes, moment_b.allocated_bytes
        ),
    ]
    found += [
        _metric("category_bytes", row.category, row.a_bytes, row.b_bytes)
        for row in comparison.categories
    ]
    starts = [(row.a_start_bytes, row.b_start_bytes) for row in comparison.categories]
    known = [(x, y) for x, y in starts if x is not None and y is not None]
    if known and len(known) == len(starts):
        resident = sum(x for x, _ in known), sum(y for _, y in known)
        found.append(_metric("resident_bytes", None, *resident))
    return found


def _metric(name: str, category: str | None, a: int, b: int) -> Metric:
    delta = b - a
    small = abs(delta) < max(1 << 20, a // 1000)
    verdict: Verdict = "same" if small else ("worse" if delta > 0 else "better")
    return Metric(
        name=name,
        unit="bytes",
        better="lower",
        rank=None,
        phase=None,
        category=category,
        a=a,
        b=b,
        delta=delta,
        relative=delta / a if a else None,
        verdict=verdict,
    )
