"""Nested configs as plain values: YAML, JSON (with comments too) and TOML, bounded and inert.

Tags are never acted on: ``!!python/object:x`` or ``!!set`` is text or a list, and said so. Aliases
are expanded up to a limit. Numbers are read by YAML 1.2 (``1e-5`` is one); a key that stands twice
has the last value, as every framework here reads it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.yaml_nodes import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_TEXT,
    read_yaml_nodes,
)
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import NativeField
from fsdp_doctor.redact import redact

_TABLE = re.compile(r"^[ \t]*\[\[?[\w.\-\"' ]+\]\]?[ \t]*(#.*)?$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"^[ \t]*[\w.\-\"]+[ \t]*=[ \t]*[^\s=]", re.MULTILINE)
_KEYS = re.compile(r"^[\w.\-\"' ]+:(\s|$)", re.MULTILINE)
_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|#[^\n]*', re.DOTALL)
_STRING_OR_COMMA = re.compile(r'"(?:[^"\\\n]|\\.)*"|,(?=\s*[}\]])')
_CACHE = "_structure"
_MAX_COMMENTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A parsed mapping with the line of each dotted key."""

    data: dict[str, Any]
    syntax: str
    """yaml, json or toml."""
    lines: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What was read as text, or not read, each with its place."""


def word_set(text: str) -> frozenset[str]:
    """Return the words of ``text``."""
    return frozenset(text.split())


def structure_of(source: Source) -> Structure:
    """Return the mapping that ``source`` holds, without secrets. It is parsed once.

    Raises InputError when it is none, broken, or beyond the limits.
    """
    known = source.__dict__.get(_CACHE)
    if known is None:
        try:
            parsed = _parse(source)
            known = replace(parsed, data=redact(parsed.data))
        except InputError as error:
            known = error
        source.__dict__[_CACHE] = known
    if isinstance(known, InputError):
        raise known
    assert isinstance(known, Structure)
    return known


def mapping_of(source: Source) -> dict[str, Any]:
    """Return the mapping that ``source`` holds, or an empty one."""
    try:
        return structure_of(source).data
    except InputError:
        return {}


def source_of(data: dict[str, Any], source: Source, notes: tuple[str, ...] = ()) -> Source:
    """Return a source that holds ``data``, taken out of ``source`` (unwrapped, merged)."""
    inner = Source(path=source.path, text=source.text)
    inner.__dict__[_CACHE] = Structure(data=data, syntax="yaml", notes=notes)
    return inner


def fields_of(structure: Structure, source: Source) -> dict[str, NativeField]:
    """Return the leaves under dotted keys, with their lines; lists stay whole."""
    found: dict[str, NativeField] = {}
    _flatten(structure.data, "", structure.lines, source.name, found)
    return found


def _flatten(
    data: dict[str, Any],
    prefix: str,
    lines: dict[str, int],
    name: str,
    found: dict[str, NativeField],
) -> None:
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            _flatten(value, f"{path}.", lines, name, found)
        else:
            found[path] = NativeField(value=value, file=name, line=lines.get(path))


def looks_like_toml(text: str) -> bool:
    """Return whether ``text`` has TOML's tables or assignments and no YAML keys."""
    if text.lstrip().startswith("{") or _KEYS.search(text):
        return False
    return bool(_TABLE.search(text) or _ASSIGNMENT.search(text))


def _parse(source: Source) -> Structure:
    text = source.text
    if text.lstrip().startswith("{"):
        found = _json(source)
        if found is not None:
            return found
    elif source.path.suffix == ".toml" or looks_like_toml(text):
        if len(text) > MAX_TEXT:
            raise InputError("more than 1 MiB of TOML: not a config", where=source.name)
        table = source.toml
        if table is not None:
            _measure(table, source)
            return Structure(data=_plain(table), syntax="toml", lines=_toml_lines(text))
        if source.path.suffix == ".toml":
            raise InputError("not valid TOML", where=source.name)
    if source.path.suffix == ".json":
        raise InputError("not valid JSON", where=source.name)
    found_yaml = read_yaml_nodes(source)
    return Structure(
        data=found_yaml.data, syntax="yaml", lines=found_yaml.lines, notes=found_yaml.notes
    )


def _json(source: Source) -> Structure | None:
    """Read JSON; comments and trailing commas, as templates have them, are let pass."""
    value = source.json
    notes: tuple[str, ...] = ()
    if value is None:
        if len(source.text) > MAX_TEXT or source.text.count("/*") > _MAX_COMMENTS:
            return None
        text = _STRING_OR_COMMENT.sub(_keep_string, source.text)
        text = _STRING_OR_COMMA.sub(_keep_string, text)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        notes = (f"{source.name}: JSON with comments or trailing commas, which json refuses",)
    if not isinstance(value, dict):
        raise InputError("holds no mapping", where=source.name)
    _measure(value, source)
    return Structure(data=value, syntax="json", lines=_json_lines(source.text), notes=notes)


def _keep_string(match: re.Match[str]) -> str:
    return match[0] if match[0].startswith('"') else ""


def _plain(value: Any) -> Any:
    """Return TOML values without dates, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool)) else str(value)


def _measure(value: Any, source: Source) -> None:
    """Raise InputError when a value is too large or nested too deeply."""
    level, total = [value], 0
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        total += len(level)
        if total > MAX_NODES:
            raise InputError(f"more than {MAX_NODES} values: not a config", where=source.name)
        if not level:
            return
    raise InputError(f"nested deeper than {MAX_DEPTH} levels", where=source.name)


_JSON_KEY = re.compile(r'^\s*"((?:[^"\\\n]|\\.)*)"\s*:(.*)$')


def _json_lines(text: str) -> dict[str, int]:
    """Return the line of each key, for JSON laid out with one key a line."""
    lines: dict[str, int] = {}
    stack: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        match = _JSON_KEY.match(line)
        if match:
            lines[".".join((*stack, match[1]))] = number
            if match[2].strip() == "{":
                stack.append(match[1])
                continue
        if line.strip().startswith("}") and stack:
            stack.pop()
    return lines


def _toml_lines(text: str) -> dict[str, int]:
    lines: dict[str, int] = {}
    prefix = ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.split("#", 1)[0].strip()
        if stripped.startswith("[") and stripped.endswith("]"):
            prefix = f"{stripped.strip('[]').strip()}."
        elif "=" in stripped:
            lines.setdefault(f"{prefix}{stripped.split('=', 1)[0].strip()}", number)
    return lines
