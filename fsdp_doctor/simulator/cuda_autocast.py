"""``torch.autocast`` on the simulated GPU casts what it casts on CUDA.

The CPU build's own lists are much shorter (its peak is 16 % too low on a mixed-precision GPT).
Kernels for the dispatch key ``AutocastCPU`` are registered from CUDA's operator lists, which are
read from the installed torch's header ``ATen/autocast_mode.h``; casts of leaf weights are kept
until the region ends, as ``cached_cast`` does there.
"""
# ruff: noqa: SLF001

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_LISTS = {
    "lower": "AT_FORALL_LOWER_PRECISION_FP",
    "float32": "AT_FORALL_FP32",
    "float32_unless_set": "AT_FORALL_FP32_SET_OPT_DTYPE",
    "promote": "AT_FORALL_PROMOTE",
}
_libraries: list[torch.library.Library] = []
_cached: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def operator_lists() -> dict[str, list[tuple[str, str]]]:
    """Return policy -> (operator, overload) as CUDA has them."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text(encoding="utf-8")
    found = {}
    for policy, macro in _LISTS.items():
        body = re.search(rf"#define {macro}\(_\)(.*?)(?:\n\n|\n#|\n//)", text, re.DOTALL)
        entries = re.findall(r"_\(\s*(\w+)\s*(?:,\s*(\w+)\s*)?\)", body.group(1)) if body else []
        found[policy] = [(name, overload) for name, overload in entries]
    return found


def install() -> None:
    """Register the kernels, once, and let ``autocast("cuda")`` mean the simulated GPU."""
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it replaces kernels of the CPU: that is the purpose
        for policy, operators in operator_lists().items():
            for name, overload in operators:
                _register(library, policy, name, overload)
    _follow_regions()


def _register(library: torch.library.Library, policy: str, name: str, overload: str) -> None:
    packet = getattr(torch.ops.aten, name, None)
    operator = getattr(packet, overload or "default", None)
    if operator is None:
        return
    full = f"{name}.{overload}" if overload else name
    library.impl(full, _kernel(operator, policy), "AutocastCPU", **_override())


def _override() -> dict[str, bool]:
    """Torch 2.6 lets kernels be replaced without being asked to."""
    known = "allow_override" in inspect.signature(torch.library.Library.impl).parameters
    return {"allow_override": True} if known else {}


def _follow_regions() -> None:
    autocast = torch.amp.autocast_mode.autocast
    init, leave = autocast.__init__, autocast.__exit__

    def start(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    def end(self: Any, *args: Any) -> Any:
        result = leave(self, *args)
        if not torch.is_autocast_enabled("cpu"):
            _cached.clear()
        return result

    autocast.__init__ = start  # type: ignore[method-assign]
    autocast.__exit__ = end  # type: ignore[method-assign]


def _castable(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if _castable(value):
        return value if value.dtype is dtype else _convert(value, dtype)
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast; a leaf weight's cast is kept for the rest of the region (``cached_cast``)."""
    weight = (
        tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and tensor.dtype is torch.float32
        and dtype is torch.get_autocast_dtype("cpu")
        and torch.is_autocast_cache_enabled()
    )
    if not weight:
        return tensor.to(dtype)
    known = _cached.get(id(tensor))
    if known is None:
        known = _cached[id(tensor)] = (tensor, tensor.to(dtype))
    return known[1]


def _kernel(operator: Any, policy: str) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            if policy == "float32_unless_set":
                args, kwargs = _set_dtype(operator, args, kwargs)
                return operator(*args, **kwargs)
            dtype = _target(policy, args, kwargs)
            if dtype is None:
                return operator(*args, **kwargs)
            # the wrapper's C++ arguments are evaluated from the last to the first, as are casts;
            # they end in the opposite order, as this list's do
            named = {name: _cast(value, dtype) for name, value in reversed(kwargs.items())}
            cast = [_cast(value, dtype) for value in reversed(args)]
            return operator(*reversed(cast), **named)

    return run


def _target(policy: str, args: Any, kwargs: Any) -> torch.dtype | None:
    if policy == "lower":
        return torch.get_autocast_dtype("cpu")
    if policy == "float32":
        return torch.float32
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _castable(leaf)]
    if any(tensor.dtype is torch.float32 for tensor in tensors):
        return torch.float32
    return tensors[0].dtype if tensors else None


def _set_dtype(operator: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Ask for a float32 result where the caller left ``dtype`` open."""
    names = [argument.name for argument in operator._schema.arguments]
    low = _castable(args[0]) and args[0].dtype in (torch.float16, torch.bfloat16)
    if not low or "dtype" not in names or kwargs.get("dtype") is not None:
        return args, kwargs
    place = names.index("dtype")
    if len(args) <= place:
        return args, {**kwargs, "dtype": torch.float32}
    if args[place] is None:
        return (*args[:place], torch.float32, *args[place + 1 :]), kwargs
    return args, kwargs
