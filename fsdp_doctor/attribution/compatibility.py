"""What two sides must have in common, and what the comparison still means where they do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fsdp_doctor.attribution.environments import HOST_THREADS, environment_differences
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.run import Run
from fsdp_doctor.runs.columns import KINDS, columns_of
from fsdp_doctor.units import format_bytes


def check_usable(runs: Sequence[Run], side: str) -> None:
    """Raise InputError when a side has no launch, or none that recorded anything."""
    if not runs:
        raise InputError(f"no run to compare on side {side}")
    if any(_has_memory(run) or _has_time(run) for run in runs):
        return
    manifest = runs[0].manifest
    failure = manifest.failure
    why = f"it failed: {failure.kind}: {failure.message}" if failure else manifest.status
    where = str(runs[0].directory) if runs[0].directory else manifest.name
    raise InputError(
        f"the run recorded neither memory nor time of any step ({why})",
        where=where,
        hint="record it again with: fsdp-doctor profile SPEC -o DIR",
    )


def check_common(a: Sequence[Run], b: Sequence[Run]) -> None:
    """Raise InputError when one side has only memory and the other only time."""
    memory = any(map(_has_memory, a)) and any(map(_has_memory, b))
    time = any(map(_has_time, a)) and any(map(_has_time, b))
    if not memory and not time:
        raise InputError(
            f"{a[0].manifest.name} and {b[0].manifest.name} have no number in common: "
            "one recorded only memory, the other only time"
        )


def _has_memory(run: Run) -> bool:
    return any(
        series.anatomy is not None
        or any(
            p.peak.allocated_bytes is not None or p.peak.reserved_bytes is not None
            for p in series.setup
        )
        or columns_of(series).with_memory().any()
        for series in run.ranks
    )


def _has_time(run: Run) -> bool:
    return any(
        series.time_breakdown or not np.isnan(columns_of(series).step_time_s).all()
        for series in run.ranks
    )


def compatibility_warnings(a: Sequence[Run], b: Sequence[Run]) -> list[str]:
    """Return what else differs between the sides than config and what must match."""
    return [
        *_size_warnings(a[0], b[0]),
        *_rank_warnings(a, b),
        *_kind_warnings(a, b),
        *_environment_warnings(a, b),
        *_launch_warnings("A", a),
        *_launch_warnings("B", b),
    ]


def _size_warnings(a: Run, b: Run) -> Iterator[str]:
    sizes_a, sizes_b = a.manifest.sizes, b.manifest.sizes
    if sizes_a is None or sizes_b is None:
        return
    same = sizes_a.parameters == sizes_b.parameters
    if same and sizes_a.parameter_bytes != sizes_b.parameter_bytes:
        yield (
            "the models are built in different dtypes "
            f"({format_bytes(sizes_a.parameter_bytes)} -> {format_bytes(sizes_b.parameter_bytes)})"
        )


def _recorded(runs: Sequence[Run]) -> set[int]:
    return {s.rank for run in runs for s in run.ranks if s.steps or s.setup or s.anatomy}


def _rank_warnings(a: Sequence[Run], b: Sequence[Run]) -> Iterator[str]:
    only_a, only_b = _recorded(a) - _recorded(b), _recorded(b) - _recorded(a)
    for side, only in (("A", only_a), ("B", only_b)):
        if only:
            yield (
                f"{len(only)} ranks are recorded only in {side} (first: {min(only)}); rows of "
                "single ranks are of the common ones, rows over all ranks of all recorded"
            )


def _kinds(runs: Sequence[Run]) -> set[str]:
    found = set()
    for run in runs:
        for series in run.ranks:
            columns = columns_of(series)
            found |= {KINDS[code] for code in set(columns.kinds[columns.steady()].tolist())}
    return found


def _kind_warnings(a: Sequence[Run], b: Sequence[Run]) -> Iterator[str]:
    kinds_a, kinds_b = _kinds(a), _kinds(b)
    if kinds_a and kinds_b and kinds_a != kinds_b:
        yield (
            f"memory is that of {'/'.join(sorted(kinds_a))} steps in A and of "
            f"{'/'.join(sorted(kinds_b))} steps in B"
        )


def _environment_warnings(a: Sequence[Run], b: Sequence[Run]) -> Iterator[str]:
    differences = environment_differences(a, b)
    for names, meaning in (
        (
            differences.keys() - HOST_THREADS,
            "such changes are not attributed and may be the cause; verdicts are of both together",
        ),
        (differences.keys() & HOST_THREADS, "that can move time, not allocated memory"),
    ):
        if names:
            listed = "; ".join(f"{name}: {differences[name]}" for name in sorted(names))
            yield f"these runs also differ in {listed}: {meaning}"


def _launch_warnings(side: str, runs: Sequence[Run]) -> Iterator[str]:
    completed = any(run.manifest.status == "completed" for run in runs)
    then = "left out" if completed else "compared on what it recorded"
    for run in runs:
        manifest = run.manifest
        if manifest.status != "completed":
            why = f" ({manifest.failure.kind})" if manifest.failure else ""
            yield f"{side}: {manifest.name} {manifest.status}{why}; {then}"
        for series in run.ranks:
            if series.anatomy is not None and series.anatomy.incomplete:
                yield f"{side}: rank {series.rank}: {series.anatomy.incomplete}"
        for warning in manifest.warnings:
            yield f"{side}: {warning}"
    configs = [effective_fields(run) for run in runs]
    if any(config != configs[0] for config in configs):
        yield f"the launches of {side} do not share one config: the first one's is compared"


def effective_fields(run: Run) -> dict[str, object]:
    """Return the fields of a run's config that act, with their values."""
    fields = run.manifest.effective_config.items()
    return {key: (value.set, value.value) for key, value in fields if value.effective}
