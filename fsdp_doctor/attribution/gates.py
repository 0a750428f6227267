"""Hold gates against the metrics of a comparison.

A gate fails only when the change is beyond its threshold as far as the statistics go: of a time,
when the whole 95 % interval of at least three launches a side is; of a number that varies, when
every pair of launches is. Exact numbers are taken at their word. A metric that the two sides cannot
be compared in cannot pass: its gate is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdp_doctor.attribution.metric_kinds import METRIC_KINDS
from fsdp_doctor.attribution.metrics import VARYING_SHARE
from fsdp_doctor.attribution.observations import VARYING
from fsdp_doctor.attribution.statistics import ALPHA, MIN_LAUNCHES
from fsdp_doctor.model.comparison import Metric
from fsdp_doctor.model.gate import ANY, Gate, GateResult, Outcome
from fsdp_doctor.model.run import Run
from fsdp_doctor.units import format_bytes, format_relative, format_seconds

COMPLETED = "completed"
"""Name of the gate that B ran at all; it stands beside every other."""


def hold_gates(
    gates: Sequence[Gate],
    metrics: Sequence[Metric],
    a: Sequence[Run],
    b: Sequence[Run],
    *,
    fail_on_unclear: bool = False,
) -> tuple[GateResult, ...]:
    """Return the result of every gate on every metric it selects, in their order.

    A gate that selects nothing that was measured is unclear. A launch of B that failed, where
    none of A did, fails the gate ``completed``: numbers of what did not run cannot pass.
    """
    if not gates:
        return ()
    results = [_completed(a, b)]
    for gate in gates:
        chosen = [metric for metric in metrics if _selects(gate, metric)]
        results += [_hold(gate, metric, fail_on_unclear=fail_on_unclear) for metric in chosen]
        if not chosen:
            results.append(_not_measured(gate, fail_on_unclear=fail_on_unclear))
    return tuple(results)


def _completed(a: Sequence[Run], b: Sequence[Run]) -> GateResult:
    failed = [run for run in b if run.manifest.failure is not None]
    known = any(run.manifest.failure is not None for run in a)
    if not failed:
        reason = f"no launch of B failed ({len(b)})"
    else:
        failure = failed[0].manifest.failure
        kind = failure.kind if failure else ""
        reason = f"{len(failed)} of {len(b)} launches of B failed ({kind})"
        reason += "; launches of A failed too" if known else "; none of A did"
    fails = bool(failed) and not known
    outcome: Outcome = "failed" if fails else "unclear" if failed else "passed"
    return GateResult(gate=COMPLETED, metric=COMPLETED, outcome=outcome, reason=reason, fails=fails)


def _selects(gate: Gate, metric: Metric) -> bool:
    pairs = (
        (gate.rank, metric.rank),
        (gate.phase, metric.phase),
        (gate.category, metric.category),
    )
    return gate.metric == metric.name and all(
        value is not None if wanted == ANY else value == wanted for wanted, value in pairs
    )


def _not_measured(gate: Gate, *, fail_on_unclear: bool) -> GateResult:
    return GateResult(
        gate=gate.text,
        metric=gate.metric,
        rank=gate.rank if isinstance(gate.rank, int) else None,
        phase=None if gate.phase == ANY else gate.phase,
        category=None if gate.category == ANY else gate.category,
        outcome="unclear",
        reason="neither side recorded it",
        fails=fail_on_unclear,
    )


def _hold(gate: Gate, metric: Metric, *, fail_on_unclear: bool) -> GateResult:
    outcome, why = _judge(gate, metric)
    numbers = _numbers(metric)
    reason = "; ".join(part for part in (numbers, why) if part)
    return GateResult(
        gate=gate.text,
        metric=metric.name,
        rank=metric.rank,
        phase=metric.phase,
        category=metric.category,
        outcome=outcome,
        reason=reason,
        fails=outcome in ("failed", "not_comparable") or (outcome == "unclear" and fail_on_unclear),
    )


def _judge(gate: Gate, metric: Metric) -> tuple[Outcome, str]:
    if metric.a is None or metric.b is None:
        return "unclear", next(iter(metric.warnings), "not recorded on both sides")
    if not metric.comparable:
        return "not_comparable", metric.warnings[-1]
    if gate.relative and metric.a == 0:
        same = metric.b == 0
        return ("passed", "") if same else ("unclear", "no percentage of 0: give an amount")
    if METRIC_KINDS[metric.name].noisy:
        return _judge_time(gate, metric)
    if metric.capped:
        return "unclear", "; ".join(metric.warnings[-1:])
    low, high = _bounds(metric)
    limit = gate.threshold * abs(float(metric.a)) if gate.relative else gate.threshold
    return _by_bounds(low, high, limit)


def _bounds(metric: Metric) -> tuple[float, float]:
    """Return between what the change of bytes or counts lies, for all that is known."""
    if metric.delta_range is None:
        return float(metric.delta or 0), float(metric.delta or 0)
    low, high = (float(value) for value in metric.delta_range)
    if metric.name in VARYING and min(metric.n_launches) == 1:
        unseen = VARYING_SHARE * float(metric.a or 0)
        return low - unseen, high + unseen
    return low, high


def _judge_time(gate: Gate, metric: Metric) -> tuple[Outcome, str]:
    if min(metric.n_launches) < MIN_LAUNCHES:
        needed = f"it takes at least {MIN_LAUNCHES} launches a side"
        return "unclear", f"{metric.n_launches[0]} + {metric.n_launches[1]} launches: {needed}"
    if metric.capped:
        return "unclear", "; ".join(metric.warnings[-1:]) or "the sides did not run alike"
    if metric.interval is None:
        return "unclear", "no interval is known"
    low, high = metric.interval
    limit = gate.threshold if gate.relative else gate.threshold / float(metric.a or 1)
    if METRIC_KINDS[metric.name].better == "higher":
        low, high, limit = -high, -low, -limit
    outcome, why = _by_bounds(low, high, limit)
    if outcome == "failed" and metric.verdict == "same":
        return "passed", "too small a part of the step for the step to feel it"
    if outcome == "failed" and (metric.p is None or metric.p >= ALPHA):
        return "unclear", "chance cannot be ruled out among so many metrics"
    return outcome, why


def _by_bounds(low: float, high: float, limit: float) -> tuple[Outcome, str]:
    if low > limit:
        return "failed", ""
    if high <= limit:
        return "passed", ""
    return "unclear", "the threshold lies within what the launches leave open"


def _numbers(metric: Metric) -> str:
    """Return the numbers of a metric in words."""
    if metric.delta is None:
        return ""
    if metric.unit == "bytes":
        change = format_bytes(metric.delta, signed=True)
        sides = f"{format_bytes(metric.a)} -> {format_bytes(metric.b)}"
    elif metric.unit == "s":
        change = format_seconds(metric.delta, signed=True)
        sides = f"{format_seconds(metric.a)} -> {format_seconds(metric.b)}"
    else:
        change, sides = f"{metric.delta:+,.0f}", f"{metric.a:,.0f} -> {metric.b:,.0f}"
    return ", ".join((f"{sides} ({change})", *_spread(metric)))


def _spread(metric: Metric) -> Iterator[str]:
    if metric.relative is not None:
        yield format_relative(metric.relative)
    if metric.interval is not None:
        low, high = (format_relative(value) for value in metric.interval)
        yield f"95 % interval {low} .. {high}"
    elif metric.delta_range is not None and metric.delta_range[0] != metric.delta_range[1]:
        low, high = (format_bytes(v, signed=True) for v in metric.delta_range)
        if metric.unit == "bytes":
            yield f"{low} .. {high} between launches"
