"""Operators that torch decomposes otherwise on a CPU are made to follow CUDA.

What a fake run allocates is decided by which operators run: attention must be the cuDNN, flash or
memory-efficient kernel (not the CPU's), RMSNorm one fused operator (torch 2.9+), dropout a byte
mask. Kernels are registered for the CPU's dispatch keys, for the rest of the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

_libraries: list[torch.library.Library] = []
_aten: Any = torch.ops.aten
_FLASH_HEAD_DIM = 256
"""Largest head of the flash kernel (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``)."""
_CUDNN_HEAD_DIM = 128
"""Largest head that cuDNN's backward takes on every GPU where it is preferred (same file)."""
_cudnn = False
"""Whether cuDNN comes first: on Hopper and Blackwell, where torch carries a cuDNN newer than 9.15
(``check_prefer_cudnn_attention`` of the same file; torch 2.11 is the first)."""
_CUDNN_SINCE = (2, 11)


Note = Callable[[str, list[Any], list[Any]], None]
"""Is told name, operands and outputs of a kernel that no operator shows."""
_note: Note = lambda _name, _reads, _writes: None  # noqa: E731


def install(note: Note = _note, *, hopper: bool = True) -> None:
    """Register the kernels, once, and tell ``note`` alone from now on.

    ``hopper``: whether the GPU is a Hopper or newer.
    """
    global _note, _cudnn  # noqa: PLW0603 (kernels of a process are registered once)
    _note = note
    _cudnn = hopper and tuple(map(int, torch.__version__.split(".")[:2])) >= _CUDNN_SINCE
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    kernels = {"scaled_dot_product_attention": _attention, "dropout": _dropout}
    if hasattr(_aten, "_fused_rms_norm"):
        kernels["rms_norm"] = _rms_norm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it replaces kernels of the CPU: that is the purpose
        for name, kernel in kernels.items():
            for key in ("AutogradCPU", "CPU"):
                library.impl(name, kernel, key)


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return _first(_aten.native_dropout(x, p, train)) if train and p > 0 else x


def _attention(  # noqa: PLR0917 (the operator's signature)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Choose the kernel by CUDA's order of preference: cuDNN, flash, memory-efficient, plain."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    half = query.dtype in (torch.bfloat16, torch.float16)
    common = (dropout_p, is_causal)
    fits = query.dim() == 4 and query.shape[-1] % 8 == 0 and query.shape[-1] <= _CUDNN_HEAD_DIM
    needs_grad = query.requires_grad or key.requires_grad or value.requires_grad
    if _cudnn and half and attn_mask is None and fits:
        operator = _aten._scaled_dot_product_cudnn_attention  # noqa: SLF001
        return _first(operator(query, key, value, None, needs_grad, *common, False, scale=scale))
    if half and attn_mask is None and query.dim() == 4 and query.shape[-1] <= _FLASH_HEAD_DIM:
        operator = _aten._scaled_dot_product_flash_attention  # noqa: SLF001
        return _first(operator(query, key, value, *common, scale=scale))
    if query.dim() == 4 and query.shape[-1] % (8 if half else 4) == 0:
        operator = _aten._scaled_dot_product_efficient_attention  # noqa: SLF001
        bias = _expand_mask(attn_mask, query, key)
        return _first(operator(query, key, value, bias, needs_grad, *common, scale=scale))
    operator = _aten._scaled_dot_product_attention_math  # noqa: SLF001
    return _first(operator(query, key, value, attn_mask, *common, scale=scale))


def _first(outputs: Any) -> torch.Tensor:
    """Keep the first output; C++ drops the others from the first to the last."""
    rest = list(outputs)
    del outputs
    output: torch.Tensor = rest.pop(0)
    while rest:
        rest.pop(0)
    return output


def _expand_mask(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        additive = torch.zeros_like(mask, dtype=query.dtype)
        mask = additive.masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class _FusedRMSNorm(torch.autograd.Function):
    """CUDA's ``_fused_rms_norm``: saves input, weight and the float32 reciprocal deviation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        """Return an output of the promoted dtype."""
        shape = (*x.shape[: x.dim() - dims], *(1,) * dims)
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        output = torch.empty_like(x, dtype=dtype)
        deviation = torch.empty(shape, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, deviation, *(() if weight is None else (weight,)))
        _note("_fused_rms_norm", [x, weight], [output, deviation])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return gradients shaped like input and weight."""
        x, _, *weight = ctx.saved_tensors
        gradient = torch.empty_like(x)
        of_weight = torch.empty_like(weight[0]) if weight else None
        _note("_fused_rms_norm_backward", [*gradients, x, *weight], [gradient, of_weight])
        return gradient, of_weight, None


def _rms_norm(
    x: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,  # noqa: ARG001 (no arithmetic happens)
) -> torch.Tensor:
    output: torch.Tensor = _FusedRMSNorm.apply(x, weight, len(shape))  # type: ignore[no-untyped-call]
    return output
