"""The answer in five lines: what, numbers, why, what to do, what else."""

from __future__ import annotations

from fsdp_doctor.logs.records import Failure
from fsdp_doctor.model.finding import Advice
from fsdp_doctor.postmortem import PostMortem
from fsdp_doctor.report.words import plural
from fsdp_doctor.units import format_bytes

_KINDS = {
    "device_oom": "out of device memory",
    "driver_oom": "the driver refused memory",
    "library_alloc": "a CUDA library could not allocate",
    "nccl_alloc": "NCCL could not allocate",
    "pinned_alloc": "host memory could not be pinned",
    "host_alloc": "out of host memory",
    "shared_memory": "out of shared memory",
    "host_oom_kill": "killed, out of host memory",
    "kernel_resource": "a kernel asked for too many resources",
    "not_memory": "not a shortage of memory",
}
_SCOPES = {
    "one_rank": "Only this rank failed on its own",
    "some_ranks": "{n} ranks failed on their own",
    "all_ranks": "All {n} ranks in the logs failed on their own",
}
_MOMENTS = {
    "before_training": "before training",
    "first_step": "in the first step",
    "steady": "after steps that fitted",
    "evaluation": "in an evaluation",
    "checkpoint": "at a checkpoint",
}


def failure_title(result: PostMortem) -> str:
    """Return the first failure in one line."""
    failure = result.triage.primary
    if failure is None:
        return "No failure found" if not result.findings else "No failure, but signs of trouble"
    place = [
        f"rank {failure.rank}" if failure.rank is not None else "rank not known",
        f"host {failure.host}" if failure.host else "",
        f"GPU {failure.device}" if failure.device is not None else "",
        f"pid {failure.pid}" if failure.pid is not None and failure.rank is None else "",
    ]
    what = kind_text(failure)
    return f"{what[0].upper()}{what[1:]}: {', '.join(part for part in place if part)}"


def kind_text(failure: Failure) -> str:
    """Return what kind of failure it is, in words."""
    text = _KINDS.get(failure.kind, failure.kind)
    if failure.kind == "host_oom_kill" and failure.exit_code in (-9, 137):
        text = "killed (SIGKILL), perhaps out of host memory"
    return text if failure.fatal else f"{text} (training went on)"


def answer_lines(result: PostMortem) -> list[str]:
    """Return the answer: at most five lines."""
    failure = result.triage.primary
    lines = []
    if failure is not None:
        lines += [f"When: {_when(failure)}.", f"Numbers: {_numbers(failure)}."]
    if result.findings:
        first = result.findings[0]
        sure = f"confidence {first.confidence:.0%}"
        doubt = "" if result.verdict["enough"] else "NOT ENOUGH EVIDENCE; best guess: "
        lines.append(f"Why: {doubt}{first.claim} ({first.cause}, {sure}).")
        if first.advice:
            lines.append(f"Do: {advice_text(first.advice[0])}.")
    else:
        lines.append(f"Why: {result.verdict['text']}.")
    lines.append(f"Others: {_others(result)}.")
    return lines


def advice_text(advice: Advice) -> str:
    """Return advice with what it saves and costs."""
    saves = ""
    if advice.saves_bytes is not None:
        saves = f"saves up to {format_bytes(advice.saves_bytes)}"
    elif advice.saves_text:
        saves = f"saves: {advice.saves_text}"
    cost = f"cost: {advice.cost}" if advice.cost else ""
    extra = "; ".join(part for part in (saves, cost) if part)
    return advice.change + (f" ({extra})" if extra else "")


def _when(failure: Failure) -> str:
    parts = []
    if failure.phase != "unknown":
        parts.append(f"in {failure.phase.replace('_', ' ')}")
    if failure.iteration is not None:
        printed = " was the last one printed" if failure.line else ""
        parts.append(f"step {failure.iteration}{printed}")
    if failure.moment in _MOMENTS:
        parts.append(_MOMENTS[failure.moment])
    return ", ".join(parts) or "the logs do not tell"


def _numbers(failure: Failure) -> str:
    parts = []
    if failure.requested_bytes is not None:
        parts.append(f"asked for {format_bytes(failure.requested_bytes)}")
    if failure.allocated_bytes is not None:
        parts.append(f"{format_bytes(failure.allocated_bytes)} allocated")
    if failure.reserved_unallocated_bytes is not None:
        parts.append(f"{format_bytes(failure.reserved_unallocated_bytes)} idle in the pool")
    if failure.free_bytes is not None:
        parts.append(f"{format_bytes(failure.free_bytes)} free")
    if failure.total_bytes is not None:
        parts.append(f"of {format_bytes(failure.total_bytes)}")
    if failure.limit_bytes is not None:
        parts.append(f"{format_bytes(failure.limit_bytes)} allowed to this process")
    return ", ".join(parts) or "the message carries none"


def _replayed(result: PostMortem) -> list[str]:
    """Return which allocator settings would have served the request, replayed on the snapshot."""
    replay = result.snapshot.replay if result.snapshot is not None else None
    if replay is None:
        return []
    fitting = [change for change in replay.changes if change.outcome == "fits"]
    if fitting:
        best = max(fitting, key=lambda change: change.margin_bytes or 0)
        spare = format_bytes(best.margin_bytes)
        return [f"replayed with {best.setting} the request is served ({spare} to spare)"]
    if all(change.outcome == "fails" for change in replay.changes):
        return ["replayed, no allocator setting that was tried serves the request"]
    return []


def _others(result: PostMortem) -> str:
    found = result.triage
    parts = []
    if found.scope in _SCOPES:
        parts.append(_SCOPES[found.scope].format(n=len(found.ranks_failed) or "several"))
    victims = sum(failure.victim_of is not None for failure in found.failures)
    if victims:
        parts.append(f"{plural(victims, 'later message')} of victims (time-outs, signals)")
    if found.recovered:
        parts.append(f"{plural(found.recovered, 'retry')} recovered".replace("retrys", "retries"))
    parts += _replayed(result)
    if result.facts.growth is not None:
        growth = result.facts.growth
        parts.append(f"memory grew by {format_bytes(growth.last_bytes - growth.first_bytes)}")
    return "; ".join(parts) or "no other failure in the logs"
