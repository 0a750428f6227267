"""What CUDA kernels allocate inside themselves: only the allocator sees it.

Read in ``aten/src/ATen/native`` of torch 2.11.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


OUTPUT_ORDER = {_aten._scaled_dot_product_cudnn_attention.default: (6, 7, 0, 1)}  # noqa: SLF001
"""In which order an operator makes its outputs, where it is not theirs: seed and offset come first
(``cuda/attention.cu``, ``cudnn/MHA.cpp``)."""


Step = int
"""Bytes of a block that is made; -n: the n-th of them is dropped; 0: the outputs are made."""


def scratch(operator: Any, args: Any) -> list[Step]:
    """Return in order what the operator's kernel makes and drops beside its outputs.

    Outputs come first where no step says otherwise. What is left at the end is dropped in the order
    in which it was made.
    """
    measure = _SCRATCH.get(operator)
    return [] if measure is None else measure(args)


def _flash_backward(args: Any) -> list[Step]:
    """``softmax_d`` and the float32 sum of the query's gradient.

    ``cuda/flash_attn/flash_api.cpp``, ``mha_bwd``: sequence rounded to 128, head to 32.
    """
    query = args[1]
    batch, heads, length, width = query.shape
    rounded = -(-length // 128) * 128
    head = -(-width // 32) * 32
    rows = batch * heads * rounded * 4
    return [rows, rows * head]


_CUDNN_LEAST = 256
"""Bytes of cuDNN's workspace that hold no numbers (recorded on an H200 with cuDNN 9.19)."""


def _cudnn_forward(_args: Any) -> list[Step]:
    """The workspace of ``cudnn/MHA.cpp``."""
    return [_CUDNN_LEAST]


def _cudnn_backward(args: Any) -> list[Step]:
    """The workspace: for each row and head a float32 sum, and the query's gradient in float32."""
    query = args[1]
    return [4 * (query.numel() + query.numel() // query.shape[-1]) + _CUDNN_LEAST]


def _efficient_backward(args: Any) -> list[Step]:
    """``delta``, then the kernel's workspace.

    ``cuda/attention_backward.cu``: in float32 ``delta`` is the sum of a product, made contiguous;
    in half precision the kernel fills it. ``cuda/mem_eff_attention/kernel_backward.h``,
    ``workspace_size``: the query's gradient in float32 tiles of rows x columns with 16 bytes of
    locks each; the tiles are those of ``kernels/cutlassB.h`` from compute capability 8.0 on.
    """
    query = args[1]
    batch, heads, length, width = query.shape
    half = query.dtype is not torch.float32
    rows = 64 if width <= 64 else 128
    columns = 128 if half and 64 < width <= 128 else 64
    tiles = -(-length // rows) * -(-width // columns)
    workspace = batch * heads * tiles * (4 * rows * columns + 16)
    delta = 4 * batch * heads * length
    if half:
        return [delta, workspace]
    return [4 * args[0].numel(), delta, delta, -2, -1, workspace]


def _softmax_backward(args: Any) -> list[Step]:
    """``Tensor tmp = grad * output``: ``cuda/SoftMax.cu``, ``softmax_backward_cuda_out``."""
    grad, output = args[0], args[1]
    return [output.numel() * max(grad.element_size(), output.element_size())]


def _scalar_base(_args: Any) -> list[Step]:
    """The base as a tensor: ``Pow.cpp``, ``pow(Scalar, Tensor)``."""
    return [8]


_UNSORTED_INDICES = 3072
"""Up to so many indices the embedding's backward adds rows as they come."""
_ROWS_PER_THREAD = 10


def _embedding_backward(args: Any) -> list[Step]:
    """The gradient made contiguous; then, for many indices, what sorts and sums them in parts.

    ``cuda/Embedding.cu``, ``embedding_dense_backward_cuda``; ``cuda/EmbeddingBackwardKernel.cu``.
    Left out: what cub needs to sort (82 kB for 4096 indices).
    """
    grad, indices, rows = args[:3]
    copied = [] if grad.is_contiguous() else [grad.nbytes]
    count = indices.numel()
    if count <= _UNSORTED_INDICES:
        return [*copied, 0] if copied else []
    parts = count // _ROWS_PER_THREAD + min(count, rows)
    each = indices.nbytes
    sort = [*copied, each, each, each]
    sums = [each, 8, each, each, each, 8, parts * indices.element_size()]
    first = len(sort)
    drop = [-(first + n) for n in (8, 7, 6, 5, 4, 2, 1)]
    partial = 4 * parts * grad.shape[-1]
    return [*sort, -first, 0, *sums[:3], -(first + 3), *sums[3:], partial, *drop]


_SCRATCH: dict[Any, Callable[[Any], list[Step]]] = {
    _aten.pow.Scalar: _scalar_base,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten._scaled_dot_product_cudnn_attention.default: _cudnn_forward,  # noqa: SLF001
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,  # noqa: SLF001
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,  # noqa: SLF001
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,  # noqa: SLF001
    _aten._softmax_backward_data.default: _softmax_backward,  # noqa: SLF001
}


_TILE = 2048
"""Bytes that a block of 128 threads copies at once."""
_BLOCKS = 132 * 2048 // 128 * 2
"""Blocks that FSDP2's copy out starts at most, on the 132 multiprocessors of an H100 or H200."""


def copy_scratch(operator: Any, args: Any, kwargs: Any) -> list[Step]:
    """Return the table of addresses and blocks that FSDP2's fused copies put on the GPU.

    ``cuda/TensorShape.cu``, ``pack_vecs``: numbers of eight bytes, dropped when the kernel has been
    launched: 8 bytes for each 2 KiB of a unit's reduced shard, fewer for a gathered one.
    """
    if getattr(operator, "namespace", "") != "fsdp":
        return []
    names = [argument.name for argument in operator._schema.arguments]  # noqa: SLF001
    named = dict(zip(names, args, strict=False)) | kwargs
    match operator.name():
        case "fsdp::split_with_sizes_copy":
            return _copy_out(
                named["all_gather_output"],
                named["all_gather_input_split_sizes"],
                named.get("dim", 0),
                named["out"],
            )
        case "fsdp::chunk_cat":
            return _chunk_cat(named["tensors"], named["dim"], named["num_chunks"], named["out"])
    return []


def _copy_out(
    gathered: torch.Tensor, splits: Sequence[int], dim: int, outs: Sequence[torch.Tensor]
) -> list[Step]:
    """``split_with_sizes_copy_out_cuda_contiguous_no_cast``."""
    if any(out.dtype != gathered.dtype for out in outs):
        return []
    chunks = math.prod(gathered.shape[:dim])
    sizes = [split * gathered.stride(dim) * gathered.element_size() for split in splits]
    blocks = sum(-(-size // _TILE) for size in sizes)
    factor = max(1, -(-blocks * chunks // _BLOCKS))
    turns = -(-factor // min(math.ceil(math.sqrt(factor)), chunks))
    blocks = sum(-(-size // (_TILE * turns)) for size in sizes)
    return [8 * (4 * len(sizes) + 1 + blocks)]


def _chunk_cat(
    tensors: Sequence[torch.Tensor], dim: int, chunks: int, out: torch.Tensor
) -> list[Step]:
    """``get_chunk_cat_metadata``; casts from bfloat16 to float32 alone are fused."""
    casts = (torch.bfloat16, torch.float32)
    source = tensors[0].dtype
    if source != out.dtype and (source, out.dtype) != casts:
        return []
    blocks = 0
    for tensor in tensors:
        rows = -(-tensor.shape[dim] // chunks)
        chunk = rows * math.prod(tensor.shape[dim + 1 :]) * out.element_size()
        blocks += -(-chunk // _TILE)
    return [8 * (6 * len(tensors) + 2 + blocks)]
