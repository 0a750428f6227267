"""Configs whose objects are written as ``_target_``: their leaves, with nothing instantiated."""

from __future__ import annotations

from typing import Any

_BACKENDS = {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}
"""megatron.core.transformer.enums.AttnBackend."""


def flatten_targets(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves under dotted keys; a named dtype, function or enum member is one leaf."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if not isinstance(value, dict) or not value:
            found[path] = value
            continue
        named = named_object(value)
        if named is None:
            found |= flatten_targets(value, f"{path}.")
        else:
            found[path] = named
    return found


def named_object(value: dict[str, Any]) -> str | None:
    """Return the name of a dtype, function or enum member, or None for another mapping.

    ``{_call_: false, _target_: torch.bfloat16}`` is ``bfloat16``.
    """
    target = value.get("_target_")
    if not isinstance(target, str):
        return None
    if value.get("_call_") is False and set(value) == {"_target_", "_call_"}:
        return target.removeprefix("torch.")
    if set(value) <= {"_target_", "_call_", "_args_", "_name_"} and "_args_" in value:
        return _member(target, value)
    return None


def _member(target: str, value: dict[str, Any]) -> str | None:
    name = value.get("_name_")
    if isinstance(name, str):
        return name
    arguments = value["_args_"]
    if not isinstance(arguments, list) or len(arguments) != 1:
        return None
    if target.endswith(".AttnBackend"):
        return _BACKENDS.get(arguments[0], str(arguments[0]))
    return f"{target.rpartition('.')[2]}({arguments[0]})"
