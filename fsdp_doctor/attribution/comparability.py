"""Which metrics of two sides can be compared, and what those still mean that can.

Numbers are always shown. A verdict is refused where what must match does not: the GPU and the
tokens of a step for times, the kind of device for everything. A model that differs is a change like
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fsdp_doctor.attribution.metric_kinds import METRIC_KINDS
from fsdp_doctor.model.comparison import Metric
from fsdp_doctor.model.mismatch import Mismatch
from fsdp_doctor.model.run import Run

_STEPS = ("step_time_s", "phase_time_s", "exposed_communication_s")
_TIMES = (*_STEPS, "tokens_per_s")
_OF_THE_DEVICE = ("outside_pytorch_bytes", "allocation_retries")
_BYTES = tuple(name for name, kind in METRIC_KINDS.items() if kind.unit == "bytes")


def find_mismatches(a: Sequence[Run], b: Sequence[Run]) -> tuple[Mismatch, ...]:
    """Return what differs between the sides besides config and software, all launches counted."""
    rules = (_device_type, _device_name, _world_size, _source, _tokens, _parameters)
    return tuple(found for rule in rules if (found := rule(a, b)) is not None)


def refused(metrics: Sequence[Metric], mismatches: Sequence[Mismatch]) -> tuple[Metric, ...]:
    """Return the metrics, those without a verdict that cannot be compared, with the reason."""
    found = list(metrics)
    for mismatch in mismatches:
        found = [_refuse(metric, mismatch) for metric in found]
    return tuple(found)


def _refuse(metric: Metric, mismatch: Mismatch) -> Metric:
    rows = mismatch.refused_over_ranks if metric.rank is None else mismatch.refused_of_ranks
    if metric.name not in (*mismatch.refused, *rows) or metric.delta is None:
        return metric
    what = "no verdict" if mismatch.known else "no firm verdict"
    reason = f"{what}: {mismatch.what} differs ({mismatch.a} -> {mismatch.b})"
    return replace(
        metric,
        verdict="unclear",
        capped=True,
        comparable=metric.comparable and not mismatch.known,
        warnings=(*metric.warnings, reason),
    )


def _device_type(a: Sequence[Run], b: Sequence[Run]) -> Mismatch | None:
    return _mismatch(
        "device_type",
        *_sides(a, b, "device_type"),
        "no verdicts: on a CPU memory is counted from tensors, on a GPU by its allocator; times "
        "are those of different devices",
        refused=tuple(METRIC_KINDS),
    )


def _device_name(a: Sequence[Run], b: Sequence[Run]) -> Mismatch | None:
    return _mismatch(
        "device_name",
        *_sides(a, b, "device_name"),
        "no verdict on times, allocation retries and memory outside PyTorch, which are those of "
        "different devices; allocated and reserved bytes still compare",
        refused=(*_TIMES, *_OF_THE_DEVICE),
    )


def _world_size(a: Sequence[Run], b: Sequence[Run]) -> Mismatch | None:
    return _mismatch(
        "world_size",
        *_sides(a, b, "world_size"),
        "bytes over all ranks compare, and include the effect of the world size; those of single "
        "ranks do not, which hold other parts of the model",
        refused_of_ranks=_BYTES,
    )


def _source(a: Sequence[Run], b: Sequence[Run]) -> Mismatch | None:
    of_a, of_b = _sides(a, b, "source")
    if ("one_rank" in of_a) != ("one_rank" in of_b):
        meaning = "a rank that ran alone waits for nobody: no verdict on times; bytes still compare"
        return _mismatch("source", of_a, of_b, meaning, refused=_TIMES)
    if "simulated" in (*of_a, *of_b):
        return _mismatch("source", of_a, of_b, "predicted bytes stand beside measured ones")
    meaning = "steps of a loop or log of its own may hold other work: no firm verdict on times"
    found = _mismatch("source", of_a, of_b, meaning, refused=_TIMES)
    return None if found is None else replace(found, known=False)


def _tokens(a: Sequence[Run], b: Sequence[Run]) -> Mismatch | None:
    tokens = _sides(a, b, "tokens_per_step")
    worlds = _sides(a, b, "world_size")
    if None in (*tokens[0], *tokens[1]):
        meaning = "the steps may do different work: no firm verdict on their times"
        return _mismatch("tokens_per_step", *tokens, meaning, refused=_TIMES)
    if _per_rank(a) == _per_rank(b):
        return _mismatch(
            "tokens_per_step",
            *tokens,
            "each rank does the same work: step times compare, and tokens/s of single ranks",
            refused_over_ranks=("tokens_per_s",),
        )
    meaning = "the steps do different work: no verdict on their times; tokens/s "
    if worlds[0] == worlds[1]:
        return _mismatch("tokens_per_step", *tokens, meaning + "compare", refused=_STEPS)
    return _mismatch(
        "tokens_per_step",
        *tokens,
        meaning + "of single ranks compare",
        refused=_STEPS,
        refused_over_ranks=("tokens_per_s",),
    )


def _per_rank(runs: Sequence[Run]) -> set[float]:
    """Return the tokens of a step by rank; known of all launches."""
    return {(run.manifest.tokens_per_step or 0) / run.manifest.world_size for run in runs}


def _parameters(a: Sequence[Run], b: Sequence[Run]) -> Mismatch | None:
    sizes = ([run.manifest.sizes for run in side] for side in (a, b))
    of_a, of_b = (
        _unique([f"{one.parameters:,} parameters" for one in side if one is not None])
        for side in sizes
    )
    if not of_a or not of_b:
        return None
    return _mismatch(
        "model",
        of_a,
        of_b,
        "bytes and times compare, and include the effect of the model",
    )


def _sides(a: Sequence[Run], b: Sequence[Run], name: str) -> tuple[list[Any], list[Any]]:
    """Return the different values that the launches of each side have, in their order."""
    of_a, of_b = (_unique([getattr(run.manifest, name) for run in side]) for side in (a, b))
    return of_a, of_b


def _unique(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _mismatch(
    what: str, a: Sequence[Any], b: Sequence[Any], meaning: str, **refusals: tuple[str, ...]
) -> Mismatch | None:
    """Return a mismatch of two sides; None where all launches have the same value."""
    if len({*a, *b}) < 2:
        return None
    told_a, told_b = (
        "/".join("not known" if value is None else str(value) for value in side) for side in (a, b)
    )
    known = None not in a and None not in b
    return Mismatch(what=what, a=told_a, b=told_b, meaning=meaning, known=known, **refusals)
