"""Say what a comparison found besides memory: step time, and ranks that are slow by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_doctor.attribution.memory_findings import change_text
from fsdp_doctor.attribution.statistics import DEFAULT_BAND
from fsdp_doctor.attribution.stragglers import Straggler
from fsdp_doctor.model.comparison import Metric
from fsdp_doctor.model.config import ConfigDiff
from fsdp_doctor.model.finding import Evidence, Finding
from fsdp_doctor.units import format_relative, format_seconds

_NAMED_SHARE = 0.1
"""Share of the change of the step from which a phase is named."""


def time_findings(
    metrics: Sequence[Metric],
    diff: ConfigDiff,
    *,
    unrepeatable: bool = False,
    band: float = DEFAULT_BAND,
) -> Iterator[Finding]:
    """Yield a finding on step time: direction and candidates only. Of sides whose steps cannot be
    compared it is on throughput.

    A verdict that is not firm gives none, except of jobs that cannot be run again: there a note
    says that these launches differ by more than ``band``; the configs may not.
    """
    whole = {m.name: m for m in metrics if m.rank is None and m.phase is None}
    step = whole.get("step_time_s")
    if step is None:
        return
    if not step.comparable:
        throughput = whole.get("tokens_per_s")
        if throughput is not None and throughput.verdict in ("worse", "better"):
            yield _throughput_finding(throughput, diff)
        return
    firm = step.verdict in ("worse", "better")
    if not firm and not (unrepeatable and _launches_differ(step, band)):
        return
    rose = (step.relative or 0.0) > 0
    direction = "up" if rose else "down"
    fitting = [
        change
        for change in diff.changed
        if change.step_time is not None and change.step_time.direction in (direction, "either")
    ]
    change_in = format_relative(abs(step.relative or 0.0)).lstrip("+")
    of = "step time" if firm else "step time of these launches"
    claim = f"{of} {'rose' if rose else 'fell'} by {change_in}"
    phases = moved_phases(metrics, step) if firm else []
    if phases:
        claim += f", in {' and '.join(str(m.phase) for m in phases)}"
    if not firm:
        claim += ", too few or too unlike launches to say that the configs did it"
    if fitting:
        claim += "; may be due to " + ", ".join(change_text(change) for change in fitting)
    else:
        claim += "; no changed field is known to do that"
    reasons = [
        Evidence(text=f"{c.key}: {c.step_time.reason}") for c in fitting if c.step_time is not None
    ]
    places = [Evidence(text=f"phase_time_s of {m.phase}: {_seconds(m)}") for m in phases]
    sure = 0.5 if len(fitting) == 1 else 0.3
    yield Finding(
        cause="step-time",
        claim=claim,
        confidence=sure if firm else sure / 2,
        severity="warning" if firm and rose else "note",
        level=0 if fitting else None,
        evidence=(Evidence(text=f"step_time_s: {_seconds(step)}"), *places, *reasons),
        rests_on=("A", "B"),
        flags=tuple(change.key for change in fitting),
    )


def _throughput_finding(tokens: Metric, diff: ConfigDiff) -> Finding:
    fell = (tokens.relative or 0.0) < 0
    change_in = format_relative(abs(tokens.relative or 0.0)).lstrip("+")
    timed = [change for change in diff.changed if change.step_time is not None]
    claim = f"throughput {'fell' if fell else 'rose'} by {change_in}, by steps of different work"
    if timed:
        claim += "; may be due to " + ", ".join(change_text(change) for change in timed)
    return Finding(
        cause="throughput",
        claim=claim,
        confidence=0.3 if timed else 0.5,
        severity="warning" if fell else "note",
        level=0 if timed else None,
        evidence=(Evidence(text=f"tokens_per_s: {tokens.a:,.0f} -> {tokens.b:,.0f}"),),
        rests_on=("A", "B"),
        flags=tuple(change.key for change in timed),
    )


def moved_phases(metrics: Sequence[Metric], step: Metric) -> list[Metric]:
    """Return the phases that firmly moved as the step did, largest change first.

    Of those with at least a tenth of the step's change; several can be named.
    """
    change = step.delta or 0.0
    found = [
        m
        for m in metrics
        if m.name == "phase_time_s"
        and m.category is None
        and m.rank is None
        and m.verdict == step.verdict
        and (m.delta or 0.0) * change > 0.0
        and abs(m.delta or 0.0) >= _NAMED_SHARE * abs(change)
    ]
    return sorted(found, key=lambda m: -abs(m.delta or 0.0))


def _seconds(metric: Metric) -> str:
    return f"{format_seconds(metric.a)} -> {format_seconds(metric.b)}"


def _launches_differ(step: Metric, band: float) -> bool:
    """Whether the interval of an unclear step time lies beyond the band of no interest."""
    if step.interval is None:
        return False
    low, high = step.interval
    return low > band or high < 1 / (1 + band) - 1


def straggler_findings(a: Sequence[Straggler], b: Sequence[Straggler]) -> Iterator[Finding]:
    """Yield a finding per straggler of B (new ones are warnings), and of A when only there."""
    known = {straggler.rank for straggler in a}
    for straggler in b:
        yield _straggler(straggler, "B", new=straggler.rank not in known)
    slow_in_b = {straggler.rank for straggler in b}
    for straggler in a:
        if straggler.rank not in slow_in_b:
            yield _straggler(straggler, "A", new=False)


def _straggler(straggler: Straggler, side: str, *, new: bool) -> Finding:
    late, lost = f"{straggler.late * 100:.1f} %", f"{straggler.lost * 100:.1f} %"
    return Finding(
        cause="straggler",
        claim=f"rank {straggler.rank} of {side} is slower than its peers by {late} of the step; "
        f"waiting for the slowest rank costs {lost} of the step time, no flag did that",
        confidence=0.8 if straggler.basis == "phases" else 0.6,
        severity="warning" if new else "note",
        evidence=(
            Evidence(
                text=f"last in {straggler.last} of {straggler.steps} steps "
                f"(p {straggler.p:.2g}, from {straggler.basis})",
                rank=straggler.rank,
            ),
        ),
        rests_on=(side,),
    )
