"""Compare two runs, or the launches of two configs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_doctor.attribution.attribute import attribute
from fsdp_doctor.attribution.basis import basis_of
from fsdp_doctor.attribution.comparability import find_mismatches, refused
from fsdp_doctor.attribution.compatibility import (
    check_common,
    check_usable,
    compatibility_warnings,
)
from fsdp_doctor.attribution.contradicted import as_measured
from fsdp_doctor.attribution.controlled import is_controlled
from fsdp_doctor.attribution.findings import straggler_findings, time_findings
from fsdp_doctor.attribution.memory_findings import memory_findings
from fsdp_doctor.attribution.metrics import compare_metrics
from fsdp_doctor.attribution.moved_peak import find_moved_peak
from fsdp_doctor.attribution.out_of_memory import out_of_memory
from fsdp_doctor.attribution.out_of_memory_findings import out_of_memory_findings
from fsdp_doctor.attribution.payload import comparison_to_payload
from fsdp_doctor.attribution.simulated_rows import attribute_by
from fsdp_doctor.attribution.statistics import DEFAULT_BAND
from fsdp_doctor.attribution.stragglers import find_stragglers
from fsdp_doctor.attribution.unfinished import bounded
from fsdp_doctor.attribution.what_if import Simulation, explore
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.comparison import Comparison
from fsdp_doctor.model.config import ConfigDiff, EffectiveConfig
from fsdp_doctor.model.finding import Evidence, Finding
from fsdp_doctor.model.run import Run

__all__ = ["compare_runs", "compare_with_diff", "comparison_to_payload", "effective_config"]


def compare_runs(
    a: Sequence[Run],
    b: Sequence[Run],
    *,
    band: float = DEFAULT_BAND,
    simulation: Simulation | None = None,
) -> Comparison:
    """Compare the launches of two sides.

    ``band`` is the relative change of step time of no interest. ``simulation``: simulates the specs
    between those of A and B, to divide memory among several changed fields. Raises InputError when
    a side recorded nothing, or when the sides have no number in common.
    """
    check_usable(a, "A")
    check_usable(b, "B")
    diff, warnings = _diff(a[0], b[0])
    return compare_with_diff(a, b, diff, band=band, warnings=warnings, simulation=simulation)


def compare_with_diff(
    a: Sequence[Run],
    b: Sequence[Run],
    diff: ConfigDiff,
    *,
    band: float = DEFAULT_BAND,
    warnings: Sequence[str] = (),
    simulation: Simulation | None = None,
) -> Comparison:
    """Compare as ``compare_runs`` does, by a config diff that is known already."""
    if band < 0.0:
        raise InputError(f"the band of no interest must not be negative: {band}")
    check_usable(a, "A")
    check_usable(b, "B")
    mismatches = find_mismatches(a, b)
    warnings = [
        *warnings,
        *(mismatch.text for mismatch in mismatches),
        *compatibility_warnings(a, b),
    ]
    failures = list(_failure_findings(a, b))
    all_a, all_b = a, b
    a, b = _comparable(a), _comparable(b)
    check_common(a, b)
    metrics = refused(bounded(compare_metrics(a, b, band=band), a, b), mismatches)
    ended = out_of_memory(a, all_b, diff.changed)
    controlled = is_controlled(a, b, diff)
    settled = controlled and len(diff.changed) == 1
    explored = None
    if simulation is not None and simulation.is_worth_it(metrics, diff, settled=settled):
        explored = explore(a, b, diff, simulation.simulate, simulation.tell)
    if isinstance(explored, str):
        warnings.append(f"the specs between A and B were not simulated: {explored}")
        explored = None
    if explored is None:
        attribution = attribute(metrics, diff.changed, a, b, controlled=controlled)
        what_if = None
    else:
        attribution, what_if = attribute_by(explored, metrics, diff.changed, a, b)
    if ended is not None:
        metrics, attribution = (*metrics, ended.metric), (*attribution, *ended.rows)
        failures += out_of_memory_findings(ended, diff.changed)
    findings = (
        *failures,
        *memory_findings(metrics, attribution, diff, find_moved_peak(a, b)),
        *time_findings(metrics, diff, unrepeatable=_only_recorded(a, b), band=band),
        *straggler_findings(find_stragglers(a), find_stragglers(b)),
    )
    return Comparison(
        name_a=a[0].manifest.name,
        name_b=b[0].manifest.name,
        diff=as_measured(diff, metrics) if settled else diff,
        metrics=metrics,
        attribution=attribution,
        findings=tuple(sorted(findings, key=_urgency)),
        warnings=tuple(warnings),
        what_if=what_if,
        mismatches=mismatches,
        basis=basis_of(all_a, all_b, a, b),
    )


def _only_recorded(a: Sequence[Run], b: Sequence[Run]) -> bool:
    return all(run.manifest.source == "recorded" for run in (*a, *b))


def _comparable(runs: Sequence[Run]) -> list[Run]:
    """Return the completed launches, or all when none completed."""
    return [run for run in runs if run.manifest.status == "completed"] or list(runs)


def _urgency(finding: Finding) -> int:
    """Order by severity; the order of importance within one severity is kept."""
    return ("error", "warning", "note").index(finding.severity)


def effective_config(run: Run) -> EffectiveConfig:
    """Return the config that a run recorded."""
    manifest = run.manifest
    version = manifest.environment.get("torch")
    return EffectiveConfig(
        format="run",
        framework="torch",
        version=None if version is None else str(version),
        fields=dict(manifest.effective_config),
    )


def _diff(a: Run, b: Run) -> tuple[ConfigDiff, list[str]]:
    config_a, config_b = effective_config(a), effective_config(b)
    missing = [side for side, config in (("A", config_a), ("B", config_b)) if not config.fields]
    if missing:
        empty = ConfigDiff(a=config_a, b=config_b, changed=(), cosmetic=(), inert=())
        return empty, [f"no config is recorded in {' and '.join(missing)}: nothing is attributed"]
    from fsdp_doctor.config.diff import diff_configs

    return diff_configs(config_a, config_b, a.manifest.sizes, b.manifest.sizes), []


def _failure_findings(a: Sequence[Run], b: Sequence[Run]) -> Iterator[Finding]:
    """Yield a finding when a launch of B failed and none of A did."""
    failed = [run for run in b if run.manifest.failure is not None]
    if not failed or any(run.manifest.failure is not None for run in a):
        return
    manifest = failed[0].manifest
    failure = manifest.failure
    assert failure is not None
    place = "".join(
        f" {word} {value}"
        for word, value in (("rank", failure.rank), ("step", failure.step), ("in", failure.phase))
        if value is not None
    )
    yield Finding(
        cause="failed-run",
        claim=f"{manifest.name} (B) failed with {failure.kind}{place and ':'}{place}; "
        "A did not fail",
        confidence=1.0,
        severity="error",
        evidence=(
            Evidence(
                text=failure.message,
                rank=failure.rank,
                step=failure.step,
                bytes=failure.requested_bytes,
            ),
        ),
        rests_on=("B",),
    )
