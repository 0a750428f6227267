"""Collectives on fake tensors for torch before 2.11, which has no kernels of its own for them.

They change no sizes: each returns what its schema says, its first argument and a work that is done,
as ``torch.distributed._tools.fake_collectives`` (torch 2.7 - 2.11) does.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_OPERATORS = (
    "broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_",
    "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
    "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_", "gather_", "scatter_",
    "alltoall_", "alltoall_base_", "barrier",
)  # fmt: skip
"""Of torch/csrc/distributed/c10d/Ops.cpp, without point to point."""
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Give the collectives that have none a kernel for fake tensors; a group must have been made.

    Nothing happens where torch has them.
    """
    lacking = [name for name in _OPERATORS if not _has_kernel(name)]
    if not lacking:
        return
    group: Any = dist.group.WORLD
    work = group.barrier().boxed()
    library = torch.library.Library("c10d", "IMPL")
    _libraries.append(library)
    for name in lacking:
        operator = getattr(torch.ops.c10d, name).default
        library.impl(name, _kernel(len(operator._schema.returns), work), "Meta")


def _has_kernel(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"))


def _kernel(returns: int, work: Any) -> Callable[..., Any]:
    def answer(*args: Any, **_kwargs: Any) -> Any:
        return work if returns == 1 else (args[0], work)

    return answer
