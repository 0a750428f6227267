"""The summary that Bridge logs at its start: what differs from Megatron-Core's own defaults.

A section's values stand under ``[ddp] Non-default values ...`` or ``[train]:``. The section
``dist`` is not printed, so torch FSDP2 shows nowhere.
"""

from __future__ import annotations

import re
from typing import Any

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.yaml_source import plain_scalar
from fsdp_doctor.model.config import NativeField

HEADING = "Configuration Summary (Non-Default Values"
_SECTION = re.compile(r"\[(?P<name>[a-z_]+)\](?: Non-default values.*)?:?\s*$")
_VALUE = re.compile(r"\s{2}(?P<key>[A-Za-z_]\w*): (?P<value>.*)$")
_DEFAULT = re.compile(r"\s+\(Mcore default: .*\)$")
_DTYPE = re.compile(r"torch\.(\w+)$")
_LONGEST_LINE = 4096


def summary_fields(source: Source) -> dict[str, NativeField]:
    """Return the values of the first summary in a log under Bridge's dotted keys."""
    found: dict[str, NativeField] = {}
    section: str | None = None
    inside = False
    for number, line in enumerate(source.lines, 1):
        if HEADING in line:
            if found:
                break
            inside = True
        if not inside or len(line) > _LONGEST_LINE:
            continue
        heading = _SECTION.search(line)
        if heading is not None:
            section = heading["name"]
            continue
        match = _VALUE.search(line)
        if match is None or section is None:
            continue
        value = _value(_DEFAULT.sub("", match["value"]))
        key = f"{section}.{match['key']}"
        found.setdefault(
            key, NativeField(value=value, source="dump", file=source.name, line=number)
        )
    return found


def _value(text: str) -> Any:
    """Return a value printed by ``repr``."""
    text = text.strip()
    if text == "None":
        return None
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    dtype = _DTYPE.match(text)
    return dtype[1] if dtype else plain_scalar(text)
