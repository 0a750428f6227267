"""What CUDA kernels allocate inside themselves: only the allocator sees it.

Read in ``aten/src/ATen/native`` of torch 2.11.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten: Any = torch.ops.aten

MATMULS = frozenset(
    {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
)
"""Operators that call cuBLAS."""


ON_GPU = {_aten._scaled_dot_product_efficient_attention.default: 2}  # noqa: SLF001
"""How many of an operator's outputs lie on the GPU: without dropout the memory-efficient kernel
keeps seed and offset on the host (``cuda/attention.cu``)."""


def scratch_bytes(operator: Any, args: Any) -> list[int]:
    """Return the sizes of the blocks that the operator's kernel makes and drops."""
    measure = _SCRATCH.get(operator)
    return [] if measure is None else measure(args)


def _flash_backward(args: Any) -> list[int]:
    """``softmax_d`` and the float32 sum of the query's gradient.

    ``cuda/flash_attn/flash_api.cpp``, ``mha_bwd``: sequence rounded to 128, head to 32.
    """
    query = args[1]
    batch, heads, length, width = query.shape
    rounded = -(-length // 128) * 128
    head = -(-width // 32) * 32
    rows = batch * heads * rounded * 4
    return [rows, rows * head]


def _softmax_backward(args: Any) -> list[int]:
    """``Tensor tmp = grad * output``: ``cuda/SoftMax.cu``, ``softmax_backward_cuda_out``."""
    grad, output = args[0], args[1]
    return [output.numel() * max(grad.element_size(), output.element_size())]


_SCRATCH: dict[Any, Callable[[Any], list[int]]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,  # noqa: SLF001
    _aten._softmax_backward_data.default: _softmax_backward,  # noqa: SLF001
}
