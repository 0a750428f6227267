"""Who holds which tensor in a Megatron-Core job.

Attributes read, none written (megatron-core 0.16 - 0.19):

* ``DistributedDataParallel.buffers`` and ``.expert_parallel_buffers``: ``param_data, grad_data``;
* Megatron-FSDP's ``param_and_grad_buffer``: ``parameter_groups`` with ``model_weight_buffer,
  main_weight_buffer, main_grad_buffer`` (each ``.data``), and the allocators of what is gathered,
  ``weight_alloc, main_grad_alloc`` (``.buckets``, with double buffers those of
  ``.backup_allocator`` and the tensors of its ``.name`` in the global memory buffer);
* ``MegatronOptimizer``: ``chained_optimizers, optimizer.state, shard_fp32_from_float16_groups,
  fp32_from_float16_groups``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp_doctor.memory.events import Label
from fsdp_doctor.model.memory import Category

_MAIN = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
_GROUP_BUFFERS = (
    ("model_weight_buffer", Category.PARAMETERS, "weight_buffer"),
    ("main_weight_buffer", Category.OPTIMIZER_STATE, "main_parameters"),
    ("main_grad_buffer", Category.GRADIENTS, "main_gradients"),
)
_ALLOCATORS = (
    ("weight_alloc", Category.UNSHARDED_PARAMETERS, "gathered_unit"),
    ("main_grad_alloc", Category.UNSHARDED_GRADIENTS, "reduce_scatter_queue"),
)


def is_megatron(optimizer: object) -> bool:
    """Whether this is one of Megatron-Core's optimizers."""
    return type(optimizer).__module__.startswith("megatron.core.")


def megatron_model_held(model: nn.Module) -> Iterator[tuple[torch.Tensor, Label]]:
    """Every tensor that Megatron's wrapper (or the standalone package's) holds now."""
    yield from _contiguous(model)
    yield from _fsdp(model)


def megatron_optimizer_held(optimizer: Any) -> Iterator[tuple[torch.Tensor, Label]]:
    """Every tensor that Megatron's optimizer holds now."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield from _optimizer(inner)


def _contiguous(model: Any) -> Iterator[tuple[torch.Tensor, Label]]:
    """The contiguous buffers of Megatron's DistributedDataParallel."""
    for name in ("buffers", "expert_parallel_buffers"):
        buffers = vars(model).get(name)
        for buffer in buffers if isinstance(buffers, list) else ():
            data = getattr(buffer, "param_data", None)
            yield from _each(data, Category.PARAMETERS, "parameter_buffer")
            grads = getattr(buffer, "grad_data", None)
            yield from _each(grads, Category.GRADIENTS, "gradient_buffer")


def _fsdp(model: Any) -> Iterator[tuple[torch.Tensor, Label]]:
    holder = vars(model).get("param_and_grad_buffer")
    for group in getattr(holder, "parameter_groups", ()):
        for name, category, kind in _GROUP_BUFFERS:
            buffer = getattr(group, name, None)
            yield from _each(getattr(buffer, "data", None), category, kind)
    for name, category, kind in _ALLOCATORS:
        allocator = getattr(holder, name, None)
        yield from _each_of(_pool(holder, allocator), category, kind)
        for owner in (allocator, getattr(allocator, "backup_allocator", None)):
            buckets = getattr(owner, "buckets", None)
            whole = buckets.values() if isinstance(buckets, dict) else ()
            yield from _each_of([getattr(b, "data", None) for b in whole], category, kind)


def _pool(holder: Any, allocator: Any) -> list[Any]:
    """The buffers that a double-buffering allocator keeps for good."""
    name = getattr(allocator, "name", None)
    module = sys.modules.get(type(holder).__module__)
    memory = getattr(module, "get_global_memory_buffer", None)
    if not isinstance(name, str) or memory is None:
        return []
    buffers = getattr(memory(), "buffer", None)
    if not isinstance(buffers, dict):
        return []
    return [tensor for (key, *_), tensor in buffers.items() if key.startswith(f"{name}_")]


def _optimizer(inner: Any) -> Iterator[tuple[torch.Tensor, Label]]:
    for name in _MAIN:
        for tensor in tree_leaves(getattr(inner, name, None)):
            yield from _each(tensor, Category.OPTIMIZER_STATE, "main_parameters")
            grad = getattr(tensor, "grad", None)
            yield from _each(grad, Category.GRADIENTS, "main_gradients")
    state = getattr(getattr(inner, "optimizer", None), "state", None)
    for values in state.values() if isinstance(state, dict) else ():
        for tensor in tree_leaves(values):
            yield from _each(tensor, Category.OPTIMIZER_STATE, "moments")


def _each_of(
    values: list[Any], category: Category, kind: str
) -> Iterator[tuple[torch.Tensor, Label]]:
    for value in values:
        yield from _each(value, category, kind)


def _each(value: Any, category: Category, kind: str) -> Iterator[tuple[torch.Tensor, Label]]:
    if isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value), Label(category, kind, None)
