"""Bytes per rank of the categories that follow from sizes alone.

P elements, N ranks in the shard group, s bytes per stored element, c per computed one:

    parameters       P s / N           ZeRO, arXiv:1910.02054, section 5
    gradients        P g / N
    optimizer_state  2 P s / N (AdamW), P s / N (SGD with momentum), 0 (SGD); plus masters
    communication    P s               DDP's buckets; 0 with gradient_as_bucket_view
    temporaries      P s / N           AdamW foreach: one square root of the second moment

N is 1 for what a strategy does not divide. Padding of shards is not counted.

FSDP1 FULL_SHARD to SHARD_GRAD_OP on an H200 (torch 2.11, 16 blocks of 51384320 elements, bf16)
raised the peak by 1644298240 bytes: the formula to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdp_doctor.config.sizes import DTYPE_BYTES, shape_from_fields, unit_parameters
from fsdp_doctor.model.config import ConfigValue
from fsdp_doctor.model.memory import Category
from fsdp_doctor.model.run import ModelSizes

Fields = Mapping[str, ConfigValue]


def category_bytes(category: Category, fields: Fields, sizes: ModelSizes | None) -> int | None:
    """Return the bytes of ``category`` on one rank, or None when no formula gives them."""
    formula = _FORMULAS.get(category)
    try:
        parameters = _parameters_of(fields, sizes)
        if formula is None or parameters is None:
            return None
        return formula(fields, parameters, sizes)
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return None  # a dtype or field that these rules do not know


def _parameters_of(fields: Fields, sizes: ModelSizes | None) -> int | None:
    shape = shape_from_fields(fields)
    if shape is not None:
        return shape.parameters
    return None if sizes is None else sizes.parameters


def _value(fields: Fields, key: str, default: Any = None) -> Any:
    """A field's value. Not its ``effective`` flag: that was set for A or B, not for a mixture."""
    field = fields.get(key)
    return default if field is None else field.value


def _width(fields: Fields, key: str) -> int:
    """Bytes of one element in the dtype of a field. Raises KeyError when not known."""
    return DTYPE_BYTES[fields[key].value]


_WHOLE = {
    "none": frozenset({"params", "grads", "optimizer"}),
    "optim": frozenset({"params", "grads"}),
    "optim_grads": frozenset({"params"}),
}
"""Sharding strategy -> states of which every rank holds all."""


def _shard(fields: Fields, elements: int, state: str) -> int:
    """Elements of a state that one rank holds: all of them, or its shard."""
    if state in _WHOLE.get(str(_value(fields, "sharding.strategy")), ()):
        return elements
    return -(-elements // int(fields["sharding.shard_size"].value))


def is_sharded(fields: Fields) -> bool:
    """Return whether the engine gathers parameters (FSDP2 does so on one rank too)."""
    return "sharding.reshard_after_forward" in fields


def waits_for_sync(fields: Fields) -> bool:
    """Return whether gradients are left unreduced in all but the last of several micro steps."""
    steps = _value(fields, "batch.accumulation", 1)
    several = isinstance(steps, int) and steps > 1
    return several and bool(_value(fields, "comm.grad_sync") == "last_microbatch")


def _stored(fields: Fields, elements: int, _: ModelSizes | None) -> int:
    if _value(fields, "offload.params") == "cpu":
        return 0
    return _shard(fields, elements, "params") * _width(fields, "precision.param_storage")


def _gradients(fields: Fields, elements: int, _: ModelSizes | None) -> int:
    if _value(fields, "offload.grads") == "cpu":
        return 0
    return _shard(fields, elements, "grads") * _width(fields, "precision.grad")


def _optimizer_state(fields: Fields, elements: int, _: ModelSizes | None) -> int:
    if _value(fields, "offload.optimizer") == "cpu":
        return 0
    kind = _value(fields, "optimizer.kind")
    momentum = 1 if _value(fields, "optimizer.momentum") else 0
    copies = {"adamw": 2, "adam": 2, "lion": 1, "sgd": momentum}[kind]
    width = copies * _width(fields, "precision.optim_states") * _bits(fields) // 32
    if _value(fields, "precision.master") is not None:
        width += _width(fields, "precision.master")
    return _shard(fields, elements, "optimizer") * width


def _bits(fields: Fields) -> int:
    """Bits of one element of the optimizer's state."""
    return int(_value(fields, "optimizer.bits", 32))


def _unsharded_parameters(fields: Fields, _: int, sizes: ModelSizes | None) -> int | None:
    """Gathered parameters at the end of forward, where the logits are: units that are not
    resharded after forward stay whole. (Resharded to n ranks: ``post_forward_shard_bytes``.)

    Under autocast each weight of a linear layer has a copy in the low dtype, kept for backward.
    """
    copies = _autocast_copies(fields)
    if copies is None:
        return None
    if not is_sharded(fields):
        return copies
    units = _units(fields, sizes)
    if not units:
        return None
    kept = sum(e for reshard, e in _reshards(fields, units) if reshard is False)
    return kept * _width(fields, "precision.compute") + copies


def _reshards(fields: Fields, units: tuple[int, ...]) -> list[tuple[bool | int, int]]:
    """(reshard_after_forward, elements) of the root unit and of the rest."""
    return [
        (fields["sharding.reshard_after_forward[root]"].value, units[0]),
        (fields["sharding.reshard_after_forward"].value, sum(units[1:])),
    ]


def post_forward_shard_bytes(fields: Fields, sizes: ModelSizes | None) -> int | None:
    """Shards that units resharded to n ranks keep between forward and backward, beside the shards
    over all ranks: 1/n in the computed dtype. FSDP2 registers them as the module's parameters
    meanwhile (``ShardedState.SHARDED_POST_FORWARD``, _fsdp_param.py, torch 2.6 - 2.14).
    """
    if not is_sharded(fields):
        return 0
    units = _units(fields, sizes)
    if not units:
        return None
    pairs = [(n, e) for n, e in _reshards(fields, units) if not isinstance(n, bool)]
    return sum(-(-e // n) for n, e in pairs) * _width(fields, "precision.compute")


def _units(fields: Fields, sizes: ModelSizes | None) -> tuple[int, ...]:
    shape = shape_from_fields(fields)
    if shape is not None:
        unit = _value(fields, "sharding.unit", "whole")
        units = unit_parameters(shape, unit, _value(fields, "sharding.blocks_per_unit", 1))
        if units:
            return units
    return () if sizes is None else sizes.unit_parameters


def _autocast_copies(fields: Fields) -> int | None:
    """Bytes of the low-precision weight copies under autocast; None when not known."""
    autocast = _value(fields, "precision.autocast", "none")
    if autocast == "none" or fields["precision.compute"].value == autocast:
        return 0
    shape = shape_from_fields(fields)
    return None if shape is None else shape.matmul_parameters * DTYPE_BYTES[autocast]


def _unsharded_gradients(fields: Fields, elements: int, _: ModelSizes | None) -> int:
    """Whole gradients kept between micro steps without synchronisation.

    FSDP2 keeps them in the computed dtype, or in ``reduce_dtype`` where that differs
    (_fsdp_param.py: to_accumulated_grad_if_needed); FSDP1 in the computed dtype.
    """
    if not is_sharded(fields) or not waits_for_sync(fields):
        return 0
    fsdp2 = fields["sharding.impl"].value == "fsdp2"
    return elements * _width(fields, "precision.reduce" if fsdp2 else "precision.compute")


def _buckets(fields: Fields, elements: int, _: ModelSizes | None) -> int | None:
    if fields["sharding.impl"].value != "ddp":
        return None
    if _value(fields, "comm.bucket_view"):
        return 0
    return elements * _width(fields, "precision.param_storage")


def _optimizer_temporaries(fields: Fields, elements: int, _: ModelSizes | None) -> int | None:
    """Largest scratch of the optimizer step on a GPU, where ``default`` is ``foreach``.

    AdamW foreach: ``_foreach_sqrt`` of the second moment. SGD foreach: gradients plus decay.
    """
    if _value(fields, "offload.optimizer") == "cpu":
        return 0
    implementation = _value(fields, "optimizer.implementation")
    if implementation == "fused":
        return 0
    if implementation == "for_loop":
        return None
    if _value(fields, "optimizer.kind") == "sgd" and not _value(fields, "optimizer.weight_decay"):
        return 0
    return _shard(fields, elements, "optimizer") * _width(fields, "precision.param_storage")


_FORMULAS: dict[Category, Callable[[Fields, int, ModelSizes | None], int | None]] = {
    Category.PARAMETERS: _stored,
    Category.GRADIENTS: _gradients,
    Category.OPTIMIZER_STATE: _optimizer_state,
    Category.UNSHARDED_PARAMETERS: _unsharded_parameters,
    Category.UNSHARDED_GRADIENTS: _unsharded_gradients,
    Category.COMMUNICATION: _buckets,
    Category.TEMPORARIES: _optimizer_temporaries,
}
"""TEMPORARIES: those of the optimizer phase only."""
