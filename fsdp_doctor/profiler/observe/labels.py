"""Who holds which tensor: the identity of memory, read from model and optimizer.

Private attributes (all read, none written), torch 2.6 - 2.14:

* FSDP2: ``FSDPModule._get_fsdp_state()``, ``FSDPState._fsdp_param_group`` (2.13+:
  ``_fsdp_param_groups``), ``FSDPParamGroup.fsdp_params``, and of each ``FSDPParam``:
  ``_sharded_param_data, sharded_param, _unsharded_param, all_gather_outputs,
  unsharded_accumulated_grad, _module_info``;
* FSDP1: ``FullyShardedDataParallel._handle``, ``FlatParamHandle.flat_param``, and of it:
  ``_local_shard, _mp_shard, _full_param_padded, _full_prec_full_param_padded, _saved_grad_shard``;
* ``DTensor._local_tensor``.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fsdp_doctor.memory.events import Label
from fsdp_doctor.model.memory import Category
from fsdp_doctor.profiler.observe.megatron_labels import (
    is_megatron,
    megatron_model_held,
    megatron_optimizer_held,
)

Found = tuple[torch.Tensor, Label]

_FLAT_SHARDS = ("_local_shard",)
_FLAT_UNSHARDED = ("_mp_shard", "_full_param_padded", "_full_prec_full_param_padded")


def plain_tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors with a storage of their own in ``value``: local shards, parts of subclasses."""
    for leaf in tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            continue
        inner = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
        flatten = getattr(inner, "__tensor_flatten__", None)
        if flatten is None:
            yield inner
            continue
        for name in flatten()[0]:
            yield from plain_tensors(getattr(inner, name))


def fsdp2_params(model: nn.Module) -> Iterator[Any]:
    """The ``FSDPParam`` objects of every FSDP2 unit in ``model``."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group]
        for group in groups:
            yield from getattr(group, "fsdp_params", ())


def flat_params(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """The flat parameters of every FSDP1 unit in ``model``, each with its unit."""
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield module, module._handle.flat_param


def held_by(
    model: nn.Module | None, optimizer: Optimizer | None, names: dict[int, str]
) -> list[Found]:
    """Every tensor that model and optimizer hold now, the certain ones first."""
    found: list[Found] = []
    if model is not None:
        found += megatron_model_held(model)
    if is_megatron(optimizer):
        found += megatron_optimizer_held(optimizer)
        optimizer = None
    if model is not None:
        found += _fsdp2(model, names)
        found += _fsdp1(model, names)
        found += _plain(model, names)
    if optimizer is not None:
        found += _optimizer_state(optimizer)
    return found


def _fsdp2(model: nn.Module, names: dict[int, str]) -> Iterator[Found]:
    for param in fsdp2_params(model):
        module = names.get(id(param._module_info.module))
        yield from _each(param._sharded_param_data, Category.PARAMETERS, None, module)
        sharded = getattr(param, "sharded_param", None)
        if sharded is not None:
            yield from _each(sharded.grad, Category.GRADIENTS, None, module)
        unsharded = getattr(param, "_unsharded_param", None)
        if unsharded is not None:
            yield from _each(unsharded, Category.UNSHARDED_PARAMETERS, None, module)
            yield from _each(unsharded.grad, Category.UNSHARDED_GRADIENTS, None, module)
        gathered = getattr(param, "all_gather_outputs", None)
        yield from _each(gathered, Category.UNSHARDED_PARAMETERS, None, module)
        accumulated = getattr(param, "unsharded_accumulated_grad", None)
        yield from _each(accumulated, Category.UNSHARDED_GRADIENTS, "accumulated", module)


def _fsdp1(model: nn.Module, names: dict[int, str]) -> Iterator[Found]:
    for unit, flat in flat_params(model):
        module = names.get(id(unit))
        for name in _FLAT_SHARDS:
            yield from _each(getattr(flat, name, None), Category.PARAMETERS, None, module)
        for name in _FLAT_UNSHARDED:
            yield from _each(getattr(flat, name, None), Category.UNSHARDED_PARAMETERS, None, module)
        yield from _each(getattr(flat, "_saved_grad_shard", None), Category.GRADIENTS, None, module)
        grad = flat.grad
        if grad is not None:
            shard = getattr(flat, "_local_shard", flat)
            whole = grad.numel() > shard.numel()
            category = Category.UNSHARDED_GRADIENTS if whole else Category.GRADIENTS
            yield from _each(grad, category, "accumulated" if whole else None, module)


def _plain(model: nn.Module, names: dict[int, str]) -> Iterator[Found]:
    for module in model.modules():
        name = names.get(id(module))
        for parameter in module._parameters.values():
            if parameter is not None:
                yield from _each(parameter, Category.PARAMETERS, None, name)
                yield from _each(parameter.grad, Category.GRADIENTS, None, name)
        yield from _each(list(module._buffers.values()), Category.BUFFERS, None, name)
        attributes = [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
        yield from _each(attributes, Category.BUFFERS, "attribute", name)


def _optimizer_state(optimizer: Optimizer) -> Iterator[Found]:
    yield from _each(
        [list(state.values()) for state in optimizer.state.values() if isinstance(state, dict)],
        Category.OPTIMIZER_STATE,
        None,
        None,
    )


def _each(
    value: object, category: Category, subcategory: str | None, module: str | None
) -> Iterator[Found]:
    if value is None:
        return
    label = Label(category, subcategory, module)
    for tensor in plain_tensors(value):
        yield tensor, label
