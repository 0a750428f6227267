"""Overrides in Hydra's style (``a.b=c``), on a command line or one a line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from fsdp_doctor.config.yaml_source import parse_value
from fsdp_doctor.errors import InputError

OVERRIDE = re.compile(
    r"(?P<sign>\+{0,2}|~)(?P<key>[A-Za-z_][\w@/]*(?:\.[\w@/]+)+)=(?P<value>.*)", re.S
)


def overrides_in(words: Iterable[str]) -> dict[int, tuple[str, Any]]:
    """Return key and value of each word that is an override, by its position."""
    found: dict[int, tuple[str, Any]] = {}
    for position, word in enumerate(words):
        match = OVERRIDE.fullmatch(word.strip())
        if match is not None and match["sign"] != "~":
            found[position] = (match["key"], override_value(match["value"]))
    return found


def override_value(text: str) -> Any:
    """Return a value as Hydra reads it; text where it is not YAML."""
    try:
        return parse_value(text, "override")
    except InputError:
        return text
