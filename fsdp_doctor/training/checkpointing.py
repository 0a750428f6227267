"""Activation checkpointing around the transformer blocks, and which modules those are."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.spec import ActivationCheckpointing

_SAVED_OPERATORS = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
)
"""Operators whose outputs ``selective`` keeps: the ones that cost most to compute again."""


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks: the children of the model's largest ``ModuleList``.

    Raises InputError when the model has none.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    if not lists:
        raise InputError(
            "the model has no ModuleList of blocks",
            where="config",
            hint="give wrap a list of class names, or none",
        )
    largest = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
    return list(largest)


def find_units(model: nn.Module, wrap: str | list[str]) -> list[nn.Module]:
    """Return the modules that become sharding units of their own (the root is one more).

    A block inside a checkpoint wrapper is found as its wrapper. Raises InputError when a class
    name matches no module.
    """
    if wrap == "none":
        return []
    if wrap == "block":
        return find_blocks(model)
    names = set(wrap)
    units: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        inner = _inner(module)
        if id(module) not in inside and type(inner).__name__ in names:
            units.append(module)
            inside.add(id(inner))
    missing = names - {type(_inner(unit)).__name__ for unit in units}
    if missing:
        raise InputError(f"no module of class {', '.join(sorted(missing))}", where="config wrap")
    return units


def _inner(module: nn.Module) -> nn.Module:
    if isinstance(module, CheckpointWrapper):
        return module.get_submodule("_checkpoint_wrapped_module")
    return module


def apply_checkpointing(model: nn.Module, config: ActivationCheckpointing) -> None:
    """Wrap blocks in place; call before sharding so that each unit holds its wrapper."""
    if config.mode == "none":
        return
    every = config.every_n if config.mode == "every_n" else 1
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    if config.mode == "selective":
        wrapper = partial(wrapper, context_fn=_selective_contexts)
    chosen = {id(block) for i, block in enumerate(find_blocks(model)) if i % every == 0}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in chosen:
                setattr(parent, name, wrapper(child))


def _selective_contexts() -> Any:
    saved = set(_SAVED_OPERATORS)

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        keep = str(operator) in saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compile_blocks(model: nn.Module) -> None:
    """``torch.compile`` every block in place; the whole model where it has no list of blocks."""
    has_blocks = any(isinstance(m, nn.ModuleList) and len(m) > 0 for m in model.modules())
    for part in find_blocks(model) if has_blocks else [model]:
        part.compile()


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the torch dtype of that name, or None for None."""
    return None if name is None else getattr(torch, name)
