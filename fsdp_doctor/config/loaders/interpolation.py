"""``${a.b}`` within one file, filled in; what points elsewhere stays as it is and is told."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fsdp_doctor.model.config import NativeField

_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.\-]*)\}")
_ANY = re.compile(r"\$\{[^}]*\}")
_MAX_PASSES = 8
_MAX_TEXT = 4096


def interpolate(
    fields: dict[str, NativeField],
) -> tuple[dict[str, NativeField], tuple[str, ...]]:
    """Return the fields with references to each other filled in, and notes on the others.

    A reference that is a whole value keeps the type of what it names.
    """
    found = dict(fields)
    for _ in range(_MAX_PASSES):
        changed = False
        for key, field in found.items():
            if isinstance(field.value, str) and "${" in field.value:
                value = _filled(field.value, found)
                if value != field.value:
                    found[key] = replace(field, value=value)
                    changed = True
        if not changed:
            break
    notes = tuple(
        f"{field.file}:{field.line or 1}: {key}: {field.value} is not filled in"
        for key, field in found.items()
        if isinstance(field.value, str) and _ANY.search(field.value)
    )
    return found, notes[:20]


def _filled(text: str, fields: dict[str, NativeField]) -> Any:
    whole = _REFERENCE.fullmatch(text)
    if whole:
        named = fields.get(whole[1])
        return text if named is None or named.value == text else named.value

    def value(match: re.Match[str]) -> str:
        named = fields.get(match[1])
        return match[0] if named is None else str(named.value)

    return _REFERENCE.sub(value, text)[:_MAX_TEXT]
