"""Our own run directories as evidence: what a log would tell, and what filled the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_doctor.logs.allocator import fragmentation
from fsdp_doctor.logs.context import Context
from fsdp_doctor.logs.messages import read_message
from fsdp_doctor.logs.progress.base import NAN, add_memory, add_times
from fsdp_doctor.logs.records import Failure, Message
from fsdp_doctor.logs.scan import ScannedLogs
from fsdp_doctor.model.memory import Anatomy, TopAllocation
from fsdp_doctor.model.run import Failure as RunFailure
from fsdp_doctor.model.run import RankSeries, Run
from fsdp_doctor.postmortem.snapshot_facts import filled_facts, top_details
from fsdp_doctor.postmortem.snapshots import log_frame
from fsdp_doctor.runs.reader import is_run_directory, load_run
from fsdp_doctor.runs.writer import MANIFEST_NAME


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the run directories among paths. Raises InputError when one is broken."""
    return [load_run(path) for path in paths if path.is_dir() and is_run_directory(path)]


def add_run(logs: ScannedLogs, run: Run) -> Failure | None:
    """Add a run's failure and history to what logs told; return the failure."""
    for series in run.ranks:
        _add_history(logs, series)
    failed = run.manifest.failure
    if failed is None:
        return None
    failure = _failure(run, failed)
    failure.order = len(logs.failures)
    logs.failures.append(failure)
    return failure


def _failure(run: Run, failed: RunFailure) -> Failure:
    text = failed.message.replace("\n", " ")
    line = text.encode("utf-8", "replace")
    message = read_message(text, Context(line, 0, 0, 0))
    if message is None:
        kind = "device_oom" if failed.kind == "device_oom" else "not_memory"
        message = Message(kind=kind, form=f"run-{failed.kind.replace('_', '-')}")
    values = {name: getattr(message, name) for name in Message.__slots__}
    series = _series(run, failed)
    place = run.directory / MANIFEST_NAME if run.directory is not None else Path(MANIFEST_NAME)
    told = {
        "rank": failed.rank,
        "host": series.host if series is not None else None,
        "pid": series.pid if series is not None else None,
        "requested_bytes": failed.requested_bytes,
        "exit_code": failed.exit_code,
    }
    values |= {name: value for name, value in told.items() if value is not None}
    failure = Failure(
        **values,
        file=str(place),
        line=0,
        text=text[:500],
        iteration=failed.step if failed.step is not None and failed.step >= 0 else None,
        phase=str(failed.phase or "unknown"),
        frames=[log_frame(frame) for frame in failed.frames],
    )
    if failure.kind == "device_oom":
        failure.fragmentation = fragmentation(failure)
    return failure


def _series(run: Run, failed: RunFailure) -> RankSeries | None:
    return next((series for series in run.ranks if series.rank == failed.rank), None)


def _add_history(logs: ScannedLogs, series: RankSeries) -> None:
    history = logs.history.of(series.rank)
    timed = [step for step in series.steps if step.step_time_s is not None]
    add_times(history, [s.step for s in timed], [s.step_time_s or NAN for s in timed])
    known = [step for step in series.steps if step.phases]
    add_memory(
        history,
        [step.step for step in known],
        allocated=[_largest(step.phases[-1:], "end", "allocated_bytes") for step in known],
        peak=[_largest(step.phases, "peak", "allocated_bytes") for step in known],
        reserved=[_largest(step.phases, "peak", "reserved_bytes") for step in known],
    )
    logs.history.count("recorded run", len(timed) + len(known))


def _largest(phases: Sequence[Any], which: str, counter: str) -> float:
    values = [getattr(getattr(phase, which), counter) for phase in phases]
    return float(max((value for value in values if value is not None), default=NAN))


def run_settings(run: Run) -> dict[str, Any]:
    """Return what a run's config sets."""
    fields = run.manifest.effective_config
    return {key: one.value for key, one in fields.items() if one.set and one.effective}


def run_facts(run: Run) -> dict[str, Any]:
    """Return what filled the failing rank's device, where the run observed it."""
    anatomy, failed = _anatomy(run), run.manifest.failure
    if anatomy is None or failed is None or failed.kind != "device_oom":
        return {}
    part = anatomy.phases.get(str(failed.phase))
    categories = part.categories if part is not None and part.categories else anatomy.categories
    held = sum(categories.values())
    shown = filled_facts(categories, anatomy.top_allocations, held=held)
    return shown | {
        "snapshot": True,
        "refused": anatomy.step == failed.step,
        "units": len(run.manifest.sizes.unit_parameters) or None if run.manifest.sizes else None,
    }


def run_details(run: Run) -> dict[str, tuple[Any, ...]]:
    """Return, by cause, the allocations that its evidence rests on."""
    anatomy = _anatomy(run)
    tops: tuple[TopAllocation, ...] = anatomy.top_allocations if anatomy is not None else ()
    failed = run.manifest.failure
    return top_details(tops, None, failed.rank if failed is not None else None)


def _anatomy(run: Run) -> Anatomy | None:
    failed = run.manifest.failure
    series = _series(run, failed) if failed is not None else None
    return series.anatomy if series is not None else None
