"""Bytes per category on the most loaded rank of a Megatron job, by closed forms.

P elements on a rank, d ranks in the shard group, w bytes of a weight, g of a main gradient:

    parameters            P w, / d with optim_grads_params
    gradients             P g, / d with optim_grads and optim_grads_params
    optimizer_state       P (master + moments), / d from optim on; + 4 P (/ d) where main gradients
                          are narrower than float32 and the optimizer is not precision-aware
    activations           s b h (10 + 24 / t) per layer and 5 a s^2 b / t for unfused attention
                          (Korthikanti et al. 2022); the 10 is / t with sequence parallelism
    logits                s b V / t x (2 + 4), + 4 with the native fused cross entropy
    unsharded_*           Megatron-FSDP's gather window and reduce queue

Each category is that of the pipeline stage that has the most of it. Sources:
docs/api-guide/dist_optimizer.md, megatron/training/theoretical_memory_usage.py and
param_and_grad_buffer.py of megatron-core 0.16 to 0.19. Padding is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.config.effects.megatron_activations import activation_bytes, logit_bytes
from fsdp_doctor.config.megatron_sizes import (
    MegatronShape,
    dtype_bytes,
    megatron_shape,
    storage_bytes,
)
from fsdp_doctor.model.config import ConfigValue
from fsdp_doctor.model.memory import Category

Fields = Mapping[str, ConfigValue]
_DIVIDED_GRADS = ("optim_grads", "optim_grads_params")
_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 1, "muon": 1, "dist_muon": 1, "lion": 1}
_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Loads:
    """Elements on the most loaded rank: of every rank's kind, and of experts."""

    dense: int
    expert: int
    unit: int
    """Of one layer, the unit that Megatron-FSDP gathers."""
    outside: int
    """Outside the layers: embedding and head."""


def estimate(fields: Fields) -> dict[Category, int | None]:
    """Return the bytes of each category that a formula gives; None where a size is missing."""
    shape = megatron_shape(fields)
    states: dict[Category, int | None] = dict.fromkeys(_STATES)
    if shape is not None:
        loads = rank_loads(shape, fields)
        states = _states(loads, fields)
    states[Category.ACTIVATIONS] = activation_bytes(fields)
    states[Category.LOGITS] = logit_bytes(fields)
    return states


def rank_loads(shape: MegatronShape, fields: Fields) -> Loads:
    """Return what the most loaded rank holds before anything is divided among data parallels."""
    tp, pp = number(fields, "parallel.tp", 1), number(fields, "parallel.pp", 1)
    etp, ep = number(fields, "parallel.etp", tp), number(fields, "parallel.ep", 1)
    outside = (shape.embedding + (shape.head if pp == 1 else 0)) // tp
    with_experts = shape.layers - shape.dense_layers
    expert = with_experts * shape.expert_layer // (pp * etp * ep)
    dense = shape.dense // (pp * tp) + outside
    return Loads(dense, expert, shape.layer // tp, outside)


def _states(loads: Loads, fields: Fields) -> dict[Category, int | None]:
    strategy = value(fields, "sharding.strategy")
    weight, grad = storage_bytes(fields), dtype_bytes(value(fields, "precision.grad"))
    found: dict[Category, int | None] = dict.fromkeys(_STATES)
    if weight is None or grad is None or not isinstance(strategy, str):
        return found
    whole = loads.dense + loads.expert
    shard = _shard(loads, fields)
    found[Category.PARAMETERS] = _scaled(
        shard if strategy == "optim_grads_params" else whole, weight
    )
    found[Category.GRADIENTS] = _scaled(shard if strategy in _DIVIDED_GRADS else whole, grad)
    state = _state_bytes(fields, grad)
    held = whole if strategy == "none" else shard
    found[Category.OPTIMIZER_STATE] = None if state is None else _offloaded(fields, held, state)
    found |= _transient(loads, fields, strategy, (weight, grad))
    return found


def _scaled(elements: int | None, width: int) -> int | None:
    return None if elements is None else elements * width


def _shard(loads: Loads, fields: Fields) -> int | None:
    """Elements of one shard; experts are divided among fewer ranks."""
    ranks = value(fields, "sharding.shard_size")
    if not isinstance(ranks, int) or ranks < 1:
        return None
    tp, etp = number(fields, "parallel.tp", 1), number(fields, "parallel.etp", 1)
    expert_ranks = max(ranks * tp // (etp * number(fields, "parallel.ep", 1)), 1)
    return -(-loads.dense // ranks) + -(-loads.expert // expert_ranks)


def _state_bytes(fields: Fields, grad: int) -> tuple[int, int] | None:
    """Return bytes per element of what stays on the device, and of what offload moves.

    The moments move; master weights do too where the optimizer keeps them (precision-aware), else
    they stay beside a copy on the host, as the float32 copy of gradients does.
    """
    master = dtype_bytes(value(fields, "precision.master"))
    first = dtype_bytes(value(fields, "precision.optim_states"))
    second = dtype_bytes(value(fields, "precision.optim_states_sq"))
    moments = _MOMENTS.get(str(value(fields, "optimizer.kind")))
    if master is None or first is None or second is None or moments is None:
        return None
    aware = bool(value(fields, "optimizer.precision_aware"))
    copy = _FLOAT if 0 < grad < _FLOAT and master == _FLOAT and not aware else 0
    both = first + (second if moments == 2 else 0)
    return (0, master + both) if aware else (master + copy, both)


def _offloaded(fields: Fields, elements: int | None, state: tuple[int, int]) -> int | None:
    if elements is None:
        return None
    share = 0.0
    if value(fields, "offload.optimizer") == "cpu":
        fraction = value(fields, "offload.optimizer_fraction")
        share = float(fraction) if isinstance(fraction, (int, float)) else 1.0
    stays, moments = state
    return elements * stays + int(elements * moments * (1 - share))


def _transient(
    loads: Loads, fields: Fields, strategy: str, widths: tuple[int, int]
) -> dict[Category, int | None]:
    """Gathered parameters and whole gradients in flight under Megatron-FSDP or torch FSDP2."""
    weight, grad = widths
    whole = loads.dense + loads.expert
    layers = whole - loads.outside
    if value(fields, "sharding.impl") == "mcore_torch_fsdp2":
        kept = value(fields, "sharding.reshard_after_forward") is False
        gathered = whole if kept else loads.outside + min(2 * loads.unit, layers)
        return {
            Category.UNSHARDED_PARAMETERS: gathered * weight,
            Category.UNSHARDED_GRADIENTS: min(2 * loads.unit, whole) * grad,
        }
    units = min(2 * loads.unit, layers)
    if value(fields, "comm.double_buffer") is True:
        window = queue = units
    else:
        elements = number(fields, "comm.unit_elems", 0)
        ahead = -(-(elements // 2) // max(loads.unit, 1))  # whole units, until they fill the window
        window = min((1 + ahead) * loads.unit, layers)
        queue = min(elements, whole)
    gathered = loads.outside + window if strategy == "optim_grads_params" else 0
    return {
        Category.UNSHARDED_PARAMETERS: gathered * weight,
        Category.UNSHARDED_GRADIENTS: queue * grad if strategy in _DIVIDED_GRADS else 0,
    }


def value(fields: Fields, key: str) -> Any:
    """Return a field's value, or None."""
    field = fields.get(key)
    return None if field is None else field.value


def number(fields: Fields, key: str, default: int) -> int:
    """Return a positive whole number, or ``default``."""
    found = value(fields, key)
    return found if isinstance(found, int) and found > 0 else default


_STATES = (
    Category.PARAMETERS,
    Category.GRADIENTS,
    Category.OPTIMIZER_STATE,
    Category.UNSHARDED_PARAMETERS,
    Category.UNSHARDED_GRADIENTS,
)
