"""Facts about machine and software, and which of them a comparison has to mind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_doctor.model.run import Run

HOST_THREADS = frozenset({"threads", "variables.OMP_NUM_THREADS", "variables.MKL_NUM_THREADS"})
"""Facts that move time, never allocated bytes."""
_IGNORED = frozenset(
    {
        "device_name",  # compared as part of the manifest
        "host_cores",
        "variables.CUDA_VISIBLE_DEVICES",
        "variables.SLURM_JOB_ID",
    }
)
_GIT = frozenset({"git", "git.commit", "git.dirty"})


def trains_own_model(run: Run) -> bool:
    """Return whether the model is the user's own code, not the built-in GPT."""
    spec = run.manifest.spec
    if spec is None:
        return True
    workload = spec.get("workload")
    model = workload.get("model") if isinstance(workload, Mapping) else None
    return isinstance(model, Mapping) and model.get("factory") is not None


def facts_of(run: Run) -> dict[str, Any]:
    """Return the facts that count, flat; the state of git only where it is the model's."""
    flat = _flat(run.manifest.environment)
    ignored = _IGNORED if trains_own_model(run) else _IGNORED | _GIT
    return {name: value for name, value in flat.items() if name not in ignored}


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def environment_differences(a: Sequence[Run], b: Sequence[Run]) -> dict[str, str]:
    """Return name -> ``value -> value`` of the facts that differ between any launches of A and B.

    Facts that only one side knows differ too; launches that know none at all are not compared.
    """
    sides = [[facts for run in runs if (facts := facts_of(run))] for runs in (a, b)]
    if not all(sides):
        return {}
    names = sorted({name for side in sides for facts in side for name in facts} - {"git.dirty"})
    found = {}
    for name in names:
        values_a, values_b = (_values(side, name) for side in sides)
        if values_a != values_b or len(values_a) > 1:
            found[name] = f"{'/'.join(values_a)} -> {'/'.join(values_b)}"
    return found


def _values(side: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    known = (facts.get(name) for facts in side)
    return list(dict.fromkeys("not known" if value is None else str(value) for value in known))


def code_is_the_same(runs: Sequence[Run]) -> bool:
    """Return whether own models were built from one clean commit, or none was under git."""
    own = [run for run in runs if trains_own_model(run)]
    states = [run.manifest.environment.get("git") for run in own]
    if all(state is None for state in states):
        return True
    clean = all(isinstance(state, Mapping) and not state.get("dirty") for state in states)
    return clean and all(state == states[0] for state in states)
