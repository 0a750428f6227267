"""Is a pair of runs a controlled experiment, so that a lone changed field did all of it?"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_doctor.attribution.compatibility import effective_fields
from fsdp_doctor.attribution.environments import (
    HOST_THREADS,
    code_is_the_same,
    environment_differences,
)
from fsdp_doctor.model.config import ConfigDiff
from fsdp_doctor.model.run import Run

_SAME = ("device_type", "device_name", "source", "tool_version")


def is_controlled(a: Sequence[Run], b: Sequence[Run], diff: ConfigDiff) -> bool:
    """Return whether nothing but ``diff.changed`` differs that allocated memory may depend on.

    All launches count. What is not known (an empty environment, a run that did not end) is not
    controlled.
    """
    runs = [*a, *b]
    if diff.unknown or any(run.manifest.status != "completed" for run in runs):
        return False
    if any(_varies(runs, name) for name in _SAME) or not code_is_the_same(runs):
        return False
    if any(_configs_vary(side) for side in (a, b)):
        return False
    if any(_model(run) != _model(runs[0]) for run in runs) and not _only_the_model(diff):
        return False
    if any(not run.manifest.environment for run in runs):
        return False
    return environment_differences(a, b).keys() <= HOST_THREADS


def _model(run: Run) -> tuple[int, int, int] | None:
    """Return the sizes of the model itself; those of its wrap units follow from the config."""
    sizes = run.manifest.sizes
    if sizes is None:
        return None
    return sizes.parameters, sizes.parameter_bytes, sizes.buffers_bytes


def _varies(runs: Sequence[Run], name: str) -> bool:
    first = getattr(runs[0].manifest, name)
    return any(getattr(run.manifest, name) != first for run in runs)


def _configs_vary(launches: Sequence[Run]) -> bool:
    first = effective_fields(launches[0])
    return any(effective_fields(run) != first for run in launches)


def _only_the_model(diff: ConfigDiff) -> bool:
    return len(diff.changed) == 1 and diff.changed[0].key.startswith("model.")
