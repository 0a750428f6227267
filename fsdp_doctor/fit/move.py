"""What a move is, and the words its conditions are written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_doctor.model.fit import Numerics

Fields = Mapping[str, Any]
"""Dotted keys of a spec -> values (``config.schema.leaf_values``)."""
Condition = Callable[[Any], bool]
Value = Any | Callable[[Fields], Any]

ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One change."""

    name: str
    title: str
    family: str
    strength: int = 1
    when: Mapping[str, Condition]
    """Key -> what its value must be; a key that the spec lacks has the value None."""
    sets: Mapping[str, Value] = field(default_factory=dict)
    """Key -> value, or a function of the spec's fields."""
    environment: Mapping[str, str] = field(default_factory=dict)
    saves: str
    costs: str
    numerics: Numerics = "same"

    def applies(self, fields: Fields) -> bool:
        """Whether the move's conditions hold."""
        return all(holds(fields.get(key)) for key, holds in self.when.items())

    def values(self, fields: Fields) -> dict[str, Any]:
        """The fields it sets, with their values."""
        return {key: v(fields) if callable(v) else v for key, v in self.sets.items()}


def is_one_of(*allowed: Any) -> Condition:
    """Hold for these values, told apart from equal ones of another type (1 is not true)."""
    return lambda value: any(value == a and type(value) is type(a) for a in allowed)


def above(limit: float) -> Condition:
    """Hold for larger numbers."""
    return lambda value: isinstance(value, (int, float)) and value > limit


def divisible(by: int) -> Condition:
    """Hold for multiples of ``by``, ``by`` included."""
    return lambda value: isinstance(value, int) and value >= by and value % by == 0


def not_(condition: Condition) -> Condition:
    """Hold where ``condition`` does not."""
    return lambda value: not condition(value)


def of(key: str, change: Callable[[int], int]) -> Callable[[Fields], Any]:
    """Set what ``change`` makes of the spec's value of ``key``."""
    return lambda fields: change(fields[key])


STRATEGY = "config.strategy"
MICRO = "workload.micro_batch"
ACCUMULATION = "config.gradient_accumulation.steps"
SIMULATED = is_one_of("ddp", "fsdp1", "fsdp2", "megatron")
