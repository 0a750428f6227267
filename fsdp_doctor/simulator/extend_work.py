"""The work of many layers from that of a few: every count and size is a straight line in layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from fsdp_doctor.model.work import Collective, Copies, Kernel, StepWork
from fsdp_doctor.simulator.extend import NotPeriodicError
from fsdp_doctor.simulator.work import foreach_launches

_Item = TypeVar("_Item", Kernel, Collective)


def extend_work(works: Sequence[StepWork], counts: Sequence[int], layers: int) -> StepWork:
    """Return the work of ``layers`` layers from that of three runs of ``counts`` layers.

    The third is foretold from the others first. Raises NotPeriodicError.
    """
    short, long, proof = works
    period = counts[1] - counts[0]
    if _sorted(_extended(short, long, 1)) != _sorted(proof):
        raise NotPeriodicError("the work of a layer depends on the number of layers")
    return _extended(short, long, (layers - counts[1]) // period)


def _sorted(work: StepWork) -> tuple[list[str], list[str], list[str]]:
    kernels, collectives, copies = work.kernels, work.collectives, work.copies
    return sorted(map(repr, kernels)), sorted(map(repr, collectives)), sorted(map(repr, copies))


def _extended(short: StepWork, long: StepWork, steps: int) -> StepWork:
    kernels = [_kernel(a, b, steps) for a, b in _pairs(short.kernels, long.kernels)]
    sent = [
        replace(
            b,
            payload_bytes=_line(a.payload_bytes, b.payload_bytes, steps),
            count=_line(a.count, b.count, steps),
        )
        for a, b in _pairs(short.collectives, long.collectives)
    ]
    return StepWork(
        kernels=tuple(kernels),
        collectives=tuple(sent),
        copies=tuple(_copies(short.copies, long.copies, steps)),
    )


def _line(a: int, b: int, steps: int) -> int:
    return b + (b - a) * steps


def _kernel(a: Kernel, b: Kernel, steps: int) -> Kernel:
    written = _line(a.written_bytes, b.written_bytes, steps)
    launches = b.launches
    if written != b.written_bytes and b.operator.startswith("_f"):  # foreach and fused optimizers
        launches = foreach_launches(written // getattr(torch, b.dtype).itemsize)
    return replace(
        b,
        flops=_line(a.flops, b.flops, steps),
        read_bytes=_line(a.read_bytes, b.read_bytes, steps),
        written_bytes=written,
        launches=launches,
        count=_line(a.count, b.count, steps),
    )


def _pairs(short: Sequence[_Item], long: Sequence[_Item]) -> list[tuple[_Item, _Item]]:
    """Lay equal items side by side, then in order those whose sizes alone differ."""
    before = {replace(item, count=1): item for item in short}
    found, new = [], []
    for item in long:
        same = before.pop(replace(item, count=1), None)
        if same is None:
            new.append(item)
        else:
            found.append((same, item))
    old = list(before.values())
    if list(map(_kind, old)) != list(map(_kind, new)):
        raise NotPeriodicError("a layer brings work that the layers before it do not")
    return found + list(zip(old, new, strict=True))


def _kind(item: _Item) -> tuple[object, ...]:
    if isinstance(item, Kernel):
        return item.phase, item.operator, item.kind, item.dtype
    return item.phase, item.kind, item.group_size, item.stride


def _copies(short: Sequence[Copies], long: Sequence[Copies], steps: int) -> list[Copies]:
    before = {(item.phase, item.place): item for item in short}
    if len(before) != len(long):
        raise NotPeriodicError("copies between host and GPU differ")
    found = []
    for b in long:
        a = before.get((b.phase, b.place))
        if a is None:
            raise NotPeriodicError("copies between host and GPU differ")
        found.append(
            replace(
                b,
                total_bytes=_line(a.total_bytes, b.total_bytes, steps),
                count=_line(a.count, b.count, steps),
            )
        )
    return found
