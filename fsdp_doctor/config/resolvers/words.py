"""Spellings of one value, folded: booleans, numbers, dtypes, sharding strategies."""

from __future__ import annotations

import math
import re
from typing import Any

DTYPES: dict[str, str] = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "bf16-true", "amp_bf16"), "bfloat16"),
    **dict.fromkeys(
        ("fp16", "float16", "half", "16-mixed", "16-true", "amp_fp16", "16"), "float16"
    ),
    **dict.fromkeys(("fp32", "float32", "float", "32", "32-true", "fp32-true"), "float32"),
    **dict.fromkeys(("fp64", "float64", "double", "64", "64-true"), "float64"),
    **dict.fromkeys(("fp8", "float8", "amp_fp8"), "fp8"),
}
"""Name -> torch's name of the dtype."""

_TRUE = frozenset({"true", "yes", "on", "1", "y", "t"})
_FALSE = frozenset({"false", "no", "off", "0", "n", "f", "none", "null", ""})
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_STRATEGY_ALIASES = {
    "_HYBRID_SHARD_ZERO2": "HYBRID_SHARD_ZERO2",
    "ZERO3": "FULL_SHARD",
    "FULL": "FULL_SHARD",
    "ZERO2": "SHARD_GRAD_OP",
    "GRAD": "SHARD_GRAD_OP",
    "DDP": "NO_SHARD",
    "HYBRID": "HYBRID_SHARD",
    "HSDP": "HYBRID_SHARD",
}


def as_bool(value: Any, default: bool = False) -> bool:
    """Return ``value`` as a switch; ``default`` for null and for text that is neither."""
    if value is None:
        return default
    if isinstance(value, str):
        folded = value.strip().lower()
        return True if folded in _TRUE else False if folded in _FALSE else default
    return bool(value)


def as_number(value: Any) -> int | float | None:
    """Return a finite number, an int where it is whole (``5e8``, ``"5_000"``), or None."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        text = value.strip().replace("_", "")
        if not re.fullmatch(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d{1,3})?", text):
            return None
        value = int(text) if re.fullmatch(r"[-+]?\d{1,40}", text) else float(text)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if abs(value) < 1e18 and value.is_integer() else value
    return value if isinstance(value, int) else None


def as_int(value: Any, default: int | None = None) -> int | None:
    """Return a whole number, or ``default``."""
    number = as_number(value)
    return number if isinstance(number, int) else default


def number_or_word(value: Any) -> Any:
    """Return a number where the text is one, else the value itself (``auto``)."""
    number = as_number(value)
    return value if number is None else number


def dtype(value: Any) -> str | None:
    """Return torch's name of a dtype: ``bf16``, ``torch.bfloat16``, ``bf16-mixed`` are bfloat16."""
    if value is None or isinstance(value, bool):
        return None
    name = str(value).strip().removeprefix("torch.").lower()
    return DTYPES.get(name.replace("bf16_", "bf16-"))


def sharding_strategy(value: Any) -> str | None:
    """Return FSDP1's name of a strategy given as name, number (1 to 5) or other spelling."""
    if value is None or isinstance(value, bool):
        return None
    name = str(value).strip().rpartition(".")[2].upper()
    if name.isdigit():
        number = int(name)
        return _STRATEGIES[number - 1] if 1 <= number <= len(_STRATEGIES) else None
    name = _STRATEGY_ALIASES.get(name, name)
    return name if name in _STRATEGIES else None


def class_name(value: Any) -> str:
    """Return the last part of an import path: ``torch.optim.AdamW`` is AdamW."""
    return str(value).strip().rpartition(".")[2]


def optimizer_kind(name: Any) -> str:
    """Return a short name of an optimizer: ``adamw`` for all that are AdamW in 32 bit."""
    folded = class_name(name).lower().replace("-", "_")
    for known, kind in _OPTIMIZERS.items():
        if folded in kind:
            return known
    return folded


_OPTIMIZERS: dict[str, frozenset[str]] = {
    "adamw": frozenset(
        {
            "adamw",
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_hf",
            "adamw_apex_fused",
            "decoupled_adamw",
            "decoupledadamw",
            "fusedadamw",
            "deepspeedcpuadam",
        }
    ),
    "adam": frozenset({"adam", "fusedadam"}),
    "sgd": frozenset({"sgd", "decoupled_sgdw"}),
    "adamw_8bit": frozenset({"adamw_8bit", "adamw_bnb_8bit", "adamw8bit"}),
    "paged_adamw_8bit": frozenset({"paged_adamw_8bit", "pagedadamw8bit"}),
    "paged_adamw": frozenset({"paged_adamw", "paged_adamw_32bit", "pagedadamw"}),
    "lion": frozenset({"lion", "decoupled_lionw", "lion_32bit"}),
}


def optimizer_bits(name: Any) -> int:
    """Return the bits of an optimizer's state elements."""
    folded = class_name(name).lower()
    return 8 if "8bit" in folded or "fp8" in folded else 4 if "4bit" in folded else 32
