"""Synthetic runs and configs for tests, in one call each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_doctor.model.config import (
    ConfigChange,
    ConfigDiff,
    ConfigValue,
    Direction,
    Effect,
    EffectiveConfig,
    StepTimeEffect,
)
from fsdp_doctor.model.memory import Anatomy, MemoryCounters, Phase, PhaseAnatomy
from fsdp_doctor.model.run import (
    Failure,
    ModelSizes,
    PhaseRecord,
    RankSeries,
    Run,
    RunManifest,
    RunSource,
    StepRecord,
    TimeBreakdown,
)

MIB = 1 << 20
GIB = 1 << 30
DEFAULT_PEAKS: dict[str, dict[str, int]] = {
    "forward": {"parameters": 1 * GIB, "activations": 2 * GIB},
    "backward": {"parameters": 1 * GIB, "activations": 2 * GIB, "gradients": 1 * GIB},
    "optimizer": {"parameters": 1 * GIB, "gradients": 1 * GIB, "optimizer_state": 1 * GIB},
}
"""Phase -> category -> bytes at the phase's peak; the step's peak is the largest."""


def make_anatomy(
    peaks: Mapping[str, Mapping[str, int]], resident: Mapping[str, int] | None = None
) -> Anatomy:
    """Return the anatomy of a step with these categories at the peak of each phase."""
    top = max(peaks, key=lambda phase: sum(peaks[phase].values()))
    return Anatomy(
        step=1,
        source="cuda_history",
        peak_phase=Phase(top),
        peak_allocated_bytes=sum(peaks[top].values()),
        categories=dict(peaks[top]),
        phases={
            phase: PhaseAnatomy(
                peak_allocated_bytes=sum(categories.values()),
                end_allocated_bytes=sum(categories.values()),
                categories=dict(categories),
            )
            for phase, categories in peaks.items()
        },
        resident=dict(resident or {"parameters": 1 * GIB, "optimizer_state": 1 * GIB}),
    )


def make_step(
    number: int,
    kind: str,
    peaks: Mapping[str, Mapping[str, int]],
    *,
    time_s: float | None = None,
    phase_times: Mapping[str, float] | None = None,
    reserved: int | None = None,
    resident: int = 2 * GIB,
    device_used: int | None = None,
    retries: int | None = 0,
) -> StepRecord:
    """Return a step whose phases peak at the sums of ``peaks``; ``{}`` leaves memory out."""
    phase_times = phase_times or {}
    names = list(dict.fromkeys([*peaks, *phase_times]))
    records = []
    for index, phase in enumerate(names):
        size = sum(peaks[phase].values()) if phase in peaks else None
        end = resident if size is not None and index == len(names) - 1 else size
        records.append(
            PhaseRecord(
                step=number,
                phase=Phase(phase),
                peak=MemoryCounters(allocated_bytes=size, reserved_bytes=reserved),
                end=MemoryCounters(allocated_bytes=end, reserved_bytes=reserved),
                time_s=phase_times.get(phase),
            )
        )
    return StepRecord(
        step=number,
        kind=kind,  # type: ignore[arg-type]
        phases=tuple(records),
        step_time_s=time_s,
        allocation_retries=retries,
        device_used_bytes=device_used,
    )


def make_rank(
    rank: int,
    *,
    peaks: Mapping[str, Mapping[str, int]] | None = None,
    times: Sequence[float] = (),
    anatomy: bool = True,
    resident: Mapping[str, int] | None = None,
    timed_memory: bool = True,
    phase_times: Mapping[str, Sequence[float]] | None = None,
    reserved: int | None = None,
    device_used: int | None = None,
    retries: Sequence[int] = (),
    breakdown: Sequence[TimeBreakdown] = (),
    observed: bool = True,
    host: str | None = None,
) -> RankSeries:
    """Return a rank with one observed step 0 and a timed step per entry of ``times``.

    ``timed_memory`` False: only the observed step has counters, as on CPU. ``phase_times``:
    phase -> seconds per timed step. ``peaks`` {}: no memory at all.
    """
    peaks = DEFAULT_PEAKS if peaks is None else peaks
    memory: dict[str, Any] = {"reserved": reserved, "device_used": device_used}
    if resident is not None:
        memory["resident"] = sum(resident.values())
    steps = [make_step(0, "observed", peaks, **memory)] if observed else []
    for index, time_s in enumerate(times):
        steps.append(
            make_step(
                index + 1,
                "timed",
                peaks if timed_memory else {},
                time_s=time_s,
                phase_times={n: values[index] for n, values in (phase_times or {}).items()},
                retries=retries[index] if retries else 0,
                **memory,
            )
        )
    return RankSeries(
        rank=rank,
        host=host,
        steps=tuple(steps),
        anatomy=make_anatomy(peaks, resident) if anatomy and peaks else None,
        time_breakdown=tuple(breakdown),
        finished=True,
        exit_code=0,
    )


def make_run(
    name: str = "run",
    *,
    world_size: int = 2,
    ranks: Sequence[RankSeries] | None = None,
    device_type: str = "cuda",
    device_name: str | None = "NVIDIA H200",
    source: RunSource = "real_ranks",
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    sizes: ModelSizes | None = None,
    tokens_per_step: int | None = 4096,
    failure: Failure | None = None,
    warnings: Sequence[str] = (),
    created: str = "2026-01-01T00:00:00Z",
    tool_version: str = "0",
    spec: dict[str, Any] | None = None,
    **rank_options: Any,
) -> Run:
    """Return a run; ``rank_options`` go to ``make_rank`` for each of ``world_size`` equal ranks.

    ``config``: canonical key -> value, all set and effective. A ``failure`` makes it failed.
    """
    if ranks is None:
        ranks = [make_rank(rank, **rank_options) for rank in range(world_size)]
    manifest = RunManifest(
        schema=1,
        name=name,
        tool_version=tool_version,
        created=created,
        status="failed" if failure else "completed",
        source=source,
        world_size=world_size,
        ranks=tuple(series.rank for series in ranks),
        device_type=device_type,  # type: ignore[arg-type]
        device_name=device_name,
        spec=spec,
        effective_config={k: make_value(v) for k, v in (config or {}).items()},
        sizes=sizes,
        environment=dict({"torch": "2.11.0"} if environment is None else environment),
        tokens_per_step=tokens_per_step,
        failure=failure,
        warnings=tuple(warnings),
    )
    return Run(manifest=manifest, ranks=tuple(ranks))


def make_value(value: Any) -> ConfigValue:
    """Return a value that is set in a file and effective."""
    return ConfigValue(set=True, value=value, source="file")


def make_effect(
    category: str, direction: Direction, size: int | None = None, phase: str | None = None
) -> Effect:
    """Return an effect with a dummy reason and source."""
    return Effect(
        category=category,
        direction=direction,
        bytes=size,
        phase=phase,
        reason=f"moves {category}",
        source="test",
    )


def make_change(
    key: str,
    a: Any,
    b: Any,
    *effects: Effect,
    step_time: Direction | None = None,
) -> ConfigChange:
    """Return a changed field with its effects; ``step_time`` is a direction."""
    timing = None if step_time is None else StepTimeEffect(direction=step_time, reason="known")
    return ConfigChange(
        key=key, a=make_value(a), b=make_value(b), effects=effects, step_time=timing
    )


def make_diff(*changes: ConfigChange, unknown: Sequence[ConfigChange] = ()) -> ConfigDiff:
    """Return a diff that consists of these changes."""
    sides = [
        EffectiveConfig(
            format="run",
            framework="torch",
            version="2.11.0",
            fields={change.key: getattr(change, side) for change in changes},
        )
        for side in ("a", "b")
    ]
    return ConfigDiff(
        a=sides[0], b=sides[1], changed=changes, cosmetic=(), inert=(), unknown=tuple(unknown)
    )
