"""Fields of Megatron's config classes by version, as Megatron-Bridge's sections name them.

``config/data/megatron_fields.json`` has for ``ddp``, ``optimizer`` and ``model`` (classes of
megatron-core 0.12 to 0.20) first version, last version and default, or defaults by the version from
which they hold; for Bridge's other sections the names alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from fsdp_doctor.config.loaders.megatron_flags import Flag, Version, parse_version

CORE_SECTIONS = ("ddp", "optimizer", "model")


@cache
def _data() -> Mapping[str, Any]:
    path = files("fsdp_doctor.config") / "data" / "megatron_fields.json"
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


@cache
def section_table(section: str) -> Mapping[str, Flag]:
    """Return the fields of ``ddp``, ``optimizer`` or ``model``."""
    table = {}
    for name, (first, last, default) in _data()[section].items():
        by_version = default if isinstance(default, dict) else {first: default}
        defaults = tuple((parse_version(since), value) for since, value in by_version.items())
        table[name] = Flag(parse_version(first), parse_version(last), defaults)
    return table


def is_known_field(section: str, name: str) -> bool | None:
    """Return whether a section has a field; None where its fields are not listed.

    Models have fields of their own beside Megatron-Core's.
    """
    if section == "model" or section not in _data():
        return True if section == "model" and name in _data()["model"] else None
    return name in _data()[section] or name.startswith("_")


def core_version_of(fields: Mapping[str, set[str]]) -> str | None:
    """Return the one version of megatron-core whose ``ddp`` and ``optimizer`` fields these are."""
    if not all(len(fields.get(section, ())) > 10 for section in ("ddp", "optimizer")):
        return None
    versions = sorted({flag.first for flag in section_table("ddp").values()} | {(0, 15), (0, 19)})
    scores = sorted((_difference(fields, version), version) for version in versions)
    if len(scores) < 2 or scores[0][0] == scores[1][0] or scores[0][0] > 3:
        return None
    return ".".join(map(str, (*scores[0][1], 0)))


def _difference(fields: Mapping[str, set[str]], version: Version) -> int:
    total = 0
    for section in ("ddp", "optimizer"):
        table = section_table(section)
        expected = {name for name, flag in table.items() if flag.known(version)}
        total += len(expected ^ fields[section])
    return total
