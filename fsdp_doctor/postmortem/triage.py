"""The first failure and its victims; one rank or all; when in the life of the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_doctor.logs.records import MEMORY_KINDS, Failure
from fsdp_doctor.logs.scan import ScannedLogs

_WEAK_FORMS = frozenset(
    {"elastic", "exit-code", "shell-killed", "srun-killed", "deepspeed", "dataloader-worker"}
)
"""SIGKILL without a word of memory: it may be a launcher's."""
_BEFORE = frozenset({"init", "load", "wrap", "checkpoint_load", "graph_capture"})
_SAME_EVENT_S = 120.0


@dataclass(slots=True, kw_only=True)
class Triage:
    """The failures in order, and what they have in common."""

    failures: list[Failure] = field(default_factory=list)
    first: int | None = None
    """Index of the failure that came first and caused the others."""
    ranks_failed: list[int] = field(default_factory=list)
    """Ranks with a failure of their own, of the first one's kind."""
    ranks_seen: int = 0
    """Ranks that the logs tell of at all."""
    scope: str = "unknown"
    """one_rank, some_ranks, all_ranks or unknown."""
    recovered: int = 0
    """Retries after which training went on."""

    @property
    def primary(self) -> Failure | None:
        """The first failure."""
        return self.failures[self.first] if self.first is not None else None


def triage(logs: ScannedLogs) -> Triage:
    """Order the failures, name the first, and point its victims at it."""
    failures = _without_exits(_in_order(logs.failures))
    _set_moments(failures, logs)
    result = Triage(failures=failures)
    result.first = _first(failures)
    result.recovered = sum(1 + f.repeats for f in failures if f.form.startswith("recovered"))
    if result.first is not None:
        _set_victims(failures, result.first)
        _complete_kill(failures, result.first)
    _set_scope(result, logs)
    return result


def _without_exits(failures: list[Failure]) -> list[Failure]:
    """Drop plain exit codes where the failures behind them are known; take pid and host."""
    exits = [f for f in failures if f.form.endswith("-exit") and not f.victim]
    ends = {id(f) for f in exits}
    others = [f for f in failures if id(f) not in ends]
    if not any(f.kind != "not_memory" or f.form == "bogus-size" for f in others):
        return failures
    for one in exits:
        for failure in others:
            if one.rank is not None and failure.rank == one.rank and not failure.victim:
                failure.host = failure.host or one.host
                failure.exit_code = failure.exit_code or one.exit_code
                for name in ("pid", "local_rank"):
                    if getattr(failure, name) is None:
                        setattr(failure, name, getattr(one, name))
    return others


def _in_order(failures: Sequence[Failure]) -> list[Failure]:
    """Sort by time where all of a kind tell theirs, else in the order of reading."""
    if failures and all(f.time is not None for f in failures if not f.victim):
        return sorted(failures, key=lambda f: (f.time if f.time is not None else 1e18, f.order))
    return sorted(failures, key=lambda f: f.order)


def _strength(failure: Failure) -> int:
    """Rank failures as a root cause: 0 is the strongest."""
    if failure.victim:
        return 5
    if not failure.fatal:
        return 3 if not failure.form.startswith(("recovered", "preempted-w")) else 4
    if failure.kind in MEMORY_KINDS:
        return 1 if failure.form in _WEAK_FORMS else 0
    return 2


def _first(failures: Sequence[Failure]) -> int | None:
    if not failures:
        return None
    best = min(_strength(failure) for failure in failures)
    index = next(i for i, failure in enumerate(failures) if _strength(failure) == best)
    return _earlier_bogus(failures, index)


def _earlier_bogus(failures: Sequence[Failure], index: int) -> int:
    """A failure that is not about memory but came well before is the root."""
    first = failures[index]
    for i, other in enumerate(failures):
        if other.kind != "not_memory" or other.victim or not other.fatal or i >= index:
            continue
        if other.form == "bogus-size" or (
            other.time is not None
            and first.time is not None
            and first.time - other.time > _SAME_EVENT_S
        ):
            return i
    return index


def _set_victims(failures: Sequence[Failure], first: int) -> None:
    root = failures[first]
    for index, failure in enumerate(failures):
        if index == first:
            continue
        if failure.victim or (failure.kind == "not_memory" and failure.form != "bogus-size"):
            failure.victim_of = first
        elif failure.form in _WEAK_FORMS and root.form not in _WEAK_FORMS:
            # the OOM killer's own words and the exit code they led to are one event
            failure.victim_of = first


def _complete_kill(failures: Sequence[Failure], first: int) -> None:
    """The OOM killer names no rank; the launcher's line about the same event does."""
    root = failures[first]
    if root.kind != "host_oom_kill" or root.rank is not None:
        return
    for other in failures:
        if other is not root and other.kind == "host_oom_kill" and other.rank is not None:
            if root.pid is not None and other.pid is not None and root.pid != other.pid:
                continue
            root.rank = other.rank
            root.host = root.host or other.host
            root.local_rank = other.local_rank if root.local_rank is None else root.local_rank
            return


def _set_moments(failures: Sequence[Failure], logs: ScannedLogs) -> None:
    last = max(
        (step for one in logs.history.ranks.values() if (step := one.last_step) is not None),
        default=None,
    )
    for failure in failures:
        if failure.iteration is None and last is not None and last >= 0 and not failure.victim:
            failure.iteration = _own_last(failure, logs, last)
        failure.moment = moment_of(failure)
        if failure.moment == "first_step" and _two_steps(failure, logs):
            failure.moment = "steady"


def _two_steps(failure: Failure, logs: ScannedLogs) -> bool:
    """Whether two steps were printed before it, whatever number the first one has."""
    own = logs.history.ranks.get(failure.rank) or logs.history.ranks.get(None)
    if own is None:
        return False
    steps = {*own.time_steps[:8], *own.memory_steps[:8]} - {-1}
    return len([step for step in steps if step <= (failure.iteration or 0)]) >= 2


def _own_last(failure: Failure, logs: ScannedLogs, last: int) -> int:
    own = logs.history.ranks.get(failure.rank)
    step = own.last_step if own is not None else None
    return last if step is None or step < 0 else step


def moment_of(failure: Failure) -> str:
    """Return when in the life of the job a failure came."""
    if failure.phase.startswith("checkpoint"):
        return "checkpoint"
    if failure.phase in ("evaluation", "generation"):
        return "evaluation"
    if failure.phase in _BEFORE and not failure.iteration:
        return "before_training"
    if failure.iteration is None:
        return "unknown"
    return "first_step" if failure.iteration <= 1 else "steady"


def _set_scope(result: Triage, logs: ScannedLogs) -> None:
    primary = result.primary
    if primary is None:
        return
    own = {
        failure.rank
        for failure in result.failures
        if failure.kind == primary.kind and not failure.victim and failure.rank is not None
        if failure.victim_of is None
    }
    seen = {f.rank for f in result.failures if f.rank is not None}
    seen |= {rank for rank in logs.history.ranks if rank is not None}
    devices = {(f.host, f.device) for f in result.failures if f.kind == primary.kind and f.fatal}
    result.ranks_failed = sorted(own)
    result.ranks_seen = len(seen)
    if len(own) > 1:
        result.scope = "all_ranks" if own == seen else "some_ranks"
    elif len(own) == 1:
        result.scope = "one_rank" if len(seen) > 1 else "unknown"
    elif len(devices) > 1:
        result.scope = "some_ranks"
