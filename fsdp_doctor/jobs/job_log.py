"""Read the logs of one job as a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from fsdp_doctor import __version__
from fsdp_doctor.config.load import LoadedConfig, split_paths
from fsdp_doctor.errors import InputError
from fsdp_doctor.jobs.dump import find_config, versions_in
from fsdp_doctor.jobs.heads import head_of
from fsdp_doctor.jobs.history_series import Series, rank_series
from fsdp_doctor.jobs.places import places_of
from fsdp_doctor.jobs.stamped_steps import NOTE as STAMPED
from fsdp_doctor.jobs.stamped_steps import add_stamped_times
from fsdp_doctor.logs.history import History
from fsdp_doctor.logs.prefix import time_in
from fsdp_doctor.logs.scan import ScannedLogs, scan_logs
from fsdp_doctor.logs.sources import find_logs
from fsdp_doctor.model.config import ConfigValue, EffectiveConfig
from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import Failure, ModelSizes, Run, RunManifest
from fsdp_doctor.postmortem.triage import triage
from fsdp_doctor.runs.writer import SCHEMA

_GIB_2 = (1 << 30) // 100 + 2
"""A hundredth of a GiB, and the rounding of two numbers to whole bytes."""
_RESOLUTIONS = {
    "deepspeed timer": _GIB_2,
    "deepspeed memory": _GIB_2,
    "torchtitan step": _GIB_2,
    "bridge memory": 10_000_000,
    "other memory line": 10 * _GIB_2,
}
"""Family of lines -> bytes to which it rounds (two decimals of GiB or GB; one where not known)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job's run, and its config by the rules of its framework."""

    run: Run
    config: EffectiveConfig | None
    """None: neither a dump in the logs nor a config beside them."""
    sizes: ModelSizes | None


def read_job(path: Path) -> Job:
    """Read a log, a directory of a job's logs, or either with its config (``job.log+conf.yaml``).

    Raises InputError when nothing can be read, or when no line tells time or memory of a step.
    """
    first, *beside = split_paths(path)
    files, _ = find_logs([first])
    paths = [file.path for file in files if file.path is not None]
    logs = scan_logs(files)
    loaded = find_config(paths, beside)
    fields = loaded.config.fields if loaded else {}
    tokens = _tokens_of_gpu(fields)
    has_rates = any(one.rates for one in logs.history.ranks.values())
    stamped = has_rates and tokens is None and add_stamped_times(logs.history, files)
    series = rank_series(logs.history, tokens)
    if stamped:
        series.notes.append(STAMPED)
    if not any(one.steps for one in series.ranks):
        raise InputError(
            "no iteration or memory lines of a known framework in it",
            where=str(first),
            hint="fsdp-doctor oom reads failures, fsdp-doctor diff configs",
        )
    manifest = RunManifest(
        schema=SCHEMA,
        name=first.stem if first.is_file() else first.name,
        tool_version=__version__,
        created=_created(paths),
        status="completed",
        source="recorded",
        world_size=_world_size(fields, series),
        ranks=tuple(one.rank for one in series.ranks),
        device_type="cuda",
        effective_config=fields,
        sizes=loaded.sizes if loaded else None,
        environment=_environment(paths, loaded),
        tokens_per_step=_tokens_per_step(fields),
        warnings=tuple(_warnings(logs, series, loaded)),
        log_lines=dict(logs.history.formats),
        log_places=places_of(paths, logs.history.formats),
        memory_resolution_bytes=_resolution(logs.history),
    )
    return Job(
        run=Run(manifest=_with_failure(manifest, logs), ranks=series.ranks, directory=first),
        config=loaded.config if loaded else None,
        sizes=loaded.sizes if loaded else None,
    )


def _with_failure(manifest: RunManifest, logs: ScannedLogs) -> RunManifest:
    found = triage(logs).primary
    if found is None or not found.fatal or found.victim:
        return manifest
    failure = Failure(
        kind=found.kind,
        message=found.text,
        rank=found.rank,
        step=found.iteration,
        phase=Phase(found.phase),
        exit_code=found.exit_code,
        frames=tuple(found.frames),
        requested_bytes=found.requested_bytes,
    )
    return replace(manifest, status="failed", failure=failure)


def _created(paths: Sequence[Path]) -> str:
    """Return when the job started: the first time in its logs, else when the first was written."""
    if not paths:
        return ""
    lines = head_of(paths[0]).splitlines()
    told = next((t for line in lines if (t := time_in(line)) is not None), None)
    start = paths[0].stat().st_mtime if told is None else told
    return datetime.fromtimestamp(start, tz=UTC).isoformat(timespec="seconds")


def _world_size(fields: dict[str, ConfigValue], series: Series) -> int:
    told = _number(fields, "world.size")
    return told or 1 + max((one.rank for one in series.ranks), default=0)


def _tokens_per_step(fields: dict[str, ConfigValue]) -> int | None:
    batch, length = _number(fields, "batch.global"), _number(fields, "batch.seq_len")
    return batch * length if batch and length else None


def _tokens_of_gpu(fields: dict[str, ConfigValue]) -> float | None:
    """Return the tokens of a step by the GPUs that share them: a data-parallel rank's."""
    micro, length = _number(fields, "batch.micro"), _number(fields, "batch.seq_len")
    whole, world = _tokens_per_step(fields), _number(fields, "world.size")
    if whole and world:
        return whole / world
    if not micro or not length or "batch.global" in fields:
        return None
    shared = math.prod(_number(fields, f"parallel.{name}") or 1 for name in ("tp", "pp", "cp"))
    return micro * length / shared


def _number(fields: dict[str, ConfigValue], key: str) -> int | None:
    value = fields[key].value if key in fields else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _environment(paths: Sequence[Path], loaded: LoadedConfig | None) -> dict[str, object]:
    told: dict[str, object] = dict(versions_in(paths))
    if loaded is not None and loaded.config.assumed is None and loaded.config.version is not None:
        told.setdefault(loaded.config.framework, loaded.config.version)
    return told


def _resolution(history: History) -> int:
    if "megatron memory" in history.formats:
        return 1  # its lines tell ranks, and count before those that do not
    return max((_RESOLUTIONS.get(family, 1) for family in history.formats), default=1)


def _warnings(logs: ScannedLogs, series: Series, loaded: LoadedConfig | None) -> list[str]:
    found = [*logs.warnings, *series.notes]
    fields = loaded.config.fields if loaded else {}
    every = _number(fields, "log_interval") or _number(fields, "metrics.log_freq")
    if every is not None and every > 1:
        found.append(f"each step time is the mean of {every} iterations")
    if loaded is None:
        found.append("its logs hold no argument dump: give its config as LOG+CONFIG")
    elif loaded.config.assumed is not None:
        found.append(loaded.config.assumed)
    return found
