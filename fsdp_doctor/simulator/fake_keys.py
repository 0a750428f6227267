"""Keys of fake mode's cache made fast: they took a third of a dry run.

Fake mode remembers what an operator returned for operands of the same metadata. Its own key lists
17 fields of every operand through dataclasses and recursion; here an ordinary operand (strided, of
this mode, without a constant) is one tuple of all that tells two such tensors apart, and a number
is itself. Whatever else an operator is given goes into the key as torch would have it.

Private: ``FakeTensorMode._prep_args_for_hash`` (torch 2.6 - 2.15; without it nothing is changed),
``FakeTensor.constant, fake_mode``.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_METHOD = "_prep_args_for_hash"
_CONSTANTS = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}
    | {torch.memory_format}
)


def install() -> None:
    """Replace the method for the rest of this process, once."""
    original: Any = getattr(FakeTensorMode, _METHOD, None)
    if original is None or original.__module__ == __name__:
        return

    def prepare(self: FakeTensorMode, result: list[object], args: Any, *rest: Any) -> None:
        if type(args) is not tuple and type(args) is not list:
            original(self, result, args, *rest)
            return
        result.extend((type(args), len(args)))
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor and _ordinary(self, arg):
                result.append(_metadata(arg))
            elif kind in _CONSTANTS:
                result.extend((kind, arg))
            elif kind is tuple or kind is list:
                prepare(self, result, arg, *rest)
            else:
                original(self, result, (arg,), *rest)

    setattr(FakeTensorMode, _METHOD, prepare)


def _ordinary(mode: FakeTensorMode, tensor: FakeTensor) -> bool:
    return (
        tensor.fake_mode is mode
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor._has_symbolic_sizes_strides
    )


def _metadata(tensor: FakeTensor) -> tuple[object, ...]:
    """Every field of torch's ``TensorMetadata`` that does not follow from the others."""
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.fake_device,
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.requires_grad,
        tensor.is_quantized,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )
