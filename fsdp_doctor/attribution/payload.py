"""A comparison as the JSON of ``compare --json``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fsdp_doctor.model.comparison import Attribution, Comparison, Metric
from fsdp_doctor.model.config import ConfigChange, ConfigValue, EffectiveConfig
from fsdp_doctor.model.finding import Finding
from fsdp_doctor.model.what_if import WhatIf


def comparison_to_payload(comparison: Comparison) -> dict[str, Any]:
    """Return the payload: bytes stay integers, what is not known is None.

    ``attribution`` holds the rows put down to fields (``key`` is null when several did it
    jointly, ``keys`` names all), ``unexplained`` the others, with the same keys. Warnings of the
    comparison belong to the envelope and are not repeated here.
    """
    diff = comparison.diff
    return {
        "a": {"name": comparison.name_a, **_config(diff.a)},
        "b": {"name": comparison.name_b, **_config(diff.b)},
        "metrics": [_metric(metric) for metric in comparison.metrics],
        "changed": [_change(change) for change in diff.changed],
        "cosmetic": [_change(change) for change in diff.cosmetic],
        "inert": [_plain(inert) for inert in diff.inert],
        "unknown": [_change(change) for change in diff.unknown],
        "attribution": [_attribution(row) for row in comparison.attribution if row.keys],
        "unexplained": [_attribution(row) for row in comparison.attribution if not row.keys],
        "findings": [_finding(finding) for finding in comparison.findings],
        "mismatches": [
            {
                **_plain(one),
                "refused": list(one.refused),
                "refused_of_ranks": list(one.refused_of_ranks),
                "refused_over_ranks": list(one.refused_over_ranks),
            }
            for one in comparison.mismatches
        ],
        "basis": [{**_plain(one), "log_places": list(one.log_places)} for one in comparison.basis],
        "gates": [_plain(result) for result in comparison.gates],
        "what_if": None if comparison.what_if is None else what_if_to_payload(comparison.what_if),
    }


def _plain(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, not descending into them."""
    kind = type(record)
    if kind not in _NAMES:
        _NAMES[kind] = tuple(field.name for field in fields(record))
    return {name: getattr(record, name) for name in _NAMES[kind]}


_NAMES: dict[type, tuple[str, ...]] = {}
"""Dataclass -> its fields; there are as many rows as ranks have metrics."""


def _config(config: EffectiveConfig) -> dict[str, Any]:
    return {"format": config.format, "framework": config.framework, "version": config.version}


def _metric(metric: Metric) -> dict[str, Any]:
    return {
        **_plain(metric),
        "interval": None if metric.interval is None else list(metric.interval),
        "n_launches": list(metric.n_launches),
        "n_steps": list(metric.n_steps),
        "warnings": list(metric.warnings),
        "delta_range": None if metric.delta_range is None else list(metric.delta_range),
    }


def _value(value: ConfigValue) -> dict[str, Any]:
    names = ("set", "value", "source", "effective", "reason")
    return {name: getattr(value, name) for name in names}


def _change(change: ConfigChange) -> dict[str, Any]:
    return {
        "key": change.key,
        "a": _value(change.a),
        "b": _value(change.b),
        "native": {"a": list(change.a.native), "b": list(change.b.native)},
        "effects": [_plain(effect) for effect in change.effects],
        "step_time": None if change.step_time is None else _plain(change.step_time),
    }


def _attribution(row: Attribution) -> dict[str, Any]:
    """Return a row; ``first_in`` and ``last_out`` are None where no point was evaluated."""
    return {
        **_plain(row),
        "key": row.keys[0] if len(row.keys) == 1 else None,
        "keys": list(row.keys),
        "interacts_with": list(row.interacts_with),
        "rests_on": list(row.rests_on),
    }


def what_if_to_payload(what_if: WhatIf) -> dict[str, Any]:
    """Return the points that were evaluated, and how they held against what was measured."""
    return {
        **_plain(what_if),
        "fields": [list(keys) for keys in what_if.fields],
        "not_simulated": list(what_if.not_simulated),
        "points": [
            {
                **_plain(point),
                "flipped": list(point.flipped),
                "overrides": list(point.overrides),
            }
            for point in what_if.points
        ],
        "misses": [{**_plain(found), "miss": found.miss} for found in what_if.misses],
        "interactions": [
            {**_plain(found), "keys": list(found.keys)} for found in what_if.interactions
        ],
        "shares": [
            {
                **_plain(share),
                "keys": list(share.keys),
                "interacts_with": list(share.interacts_with),
                "rests_on": list(share.rests_on),
            }
            for share in what_if.shares
        ],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        **_plain(finding),
        "evidence": [_plain(evidence) for evidence in finding.evidence],
        "rests_on": list(finding.rests_on),
        "flags": list(finding.flags),
        "advice": [_plain(advice) for advice in finding.advice],
    }
