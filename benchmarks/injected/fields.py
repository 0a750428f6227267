"""Of which fields the pairs are made: what is trained, bases, culprits and decoys of a strategy.

A culprit may move memory; whether it does, and how much, its launches say. A Megatron base differs
from another in Megatron's own switches, so each is a strategy here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from injected import megatron_fields, torch_fields
from injected.field import COMPANIONS, Field
from injected.shapes import SHAPES

STEPS: dict[str, Any] = {"warmup": 3, "timed": 1, "kernel_profile": False}
TORCH = torch_fields.STRATEGIES
STRATEGIES = (*TORCH, *megatron_fields.STRATEGIES)


def base(strategy: str, device: str, ranks: int) -> dict[str, Any]:
    """Return the spec that both sides of a pair start from."""
    return {
        "world_size": ranks,
        "workload": SHAPES[device].workload(),
        "steps": dict(STEPS),
        "config": {"strategy": strategy}
        if strategy in TORCH
        else copy.deepcopy(megatron_fields.CONFIGS[strategy]),
    }


def culprits(strategy: str, device: str) -> list[Field]:
    """Return the fields that may be to blame; several of one key: several other values."""
    known = torch_fields.CULPRITS if strategy in TORCH else megatron_fields.CULPRITS
    own = [*known[strategy]]
    if device == "cuda":
        own += torch_fields.ON_CUDA.get(strategy, ())
    return [*SHAPES[device].culprits(), *own]


def decoys(strategy: str) -> list[Field]:
    """Return the fields that leave memory alone."""
    known = torch_fields.DECOYS if strategy in TORCH else megatron_fields.DECOYS
    return known[strategy]


def companions(one: Field, ranks: int) -> Mapping[str, Any]:
    """Return what a field's other value needs beside it: key -> value."""
    key, _, value = one
    told = COMPANIONS.get((key, value) if isinstance(value, str | bool) else (key, None), {})
    mesh = {"replicate": 2, "shard": ranks // 2}
    return {name: mesh if wanted == "mesh" else wanted for name, wanted in told.items()}


def flip(raw: dict[str, Any], one: Field, ranks: int) -> None:
    """Give a spec a field's other value, and what that needs."""
    value = {"replicate": 2, "shard": ranks // 2} if one[2] == "mesh" else one[2]
    put(raw, one[0], value)
    for key, wanted in companions(one, ranks).items():
        put(raw, key, wanted)


def put(raw: dict[str, Any], path: str, value: Any) -> None:
    """Write a value into a spec by its dotted key."""
    *parents, last = path.split(".")
    section = raw
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = copy.deepcopy(value)
