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

import yaml

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.yaml_source import plain_scalar
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import NativeField
from fsdp_doctor.redact import redact

MAX_NODES = 100_000
"""Most values of one config, aliases expanded."""
MAX_DEPTH = 64
"""Deepest nesting."""
MAX_YAML_BYTES = 1 << 20
"""Largest YAML config: composing is slow, and no real one comes near."""

_STANDARD = "tag:yaml.org,2002:"
_PLAIN = "!plain"
_TABLE = re.compile(r"^\s*\[\[?[\w.\-\"' ]+\]\]?\s*(#.*)?$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"^\s*[\w.\-\"]+\s*=\s*[^\s=]", re.MULTILINE)
_KEYS = re.compile(r"^[\w.\-\"' ]+:(\s|$)", re.MULTILINE)
_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|#[^\n]*', re.DOTALL)
_STRING_OR_COMMA = re.compile(r'"(?:[^"\\\n]|\\.)*"|,(?=\s*[}\]])')
_CACHE = "_structure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A parsed mapping with the line of each dotted key."""

    data: dict[str, Any]
    syntax: str
    """yaml, json or toml."""
    lines: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What was read as text, or not read, each with its place."""


class _Nodes(yaml.CSafeLoader):
    """Composes nodes only; marks scalars whose type is left to the schema."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _PLAIN
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]


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
        table = source.toml
        if table is not None:
            _measure(table, source)
            return Structure(data=_plain(table), syntax="toml", lines=_toml_lines(text))
        if source.path.suffix == ".toml":
            raise InputError("not valid TOML", where=source.name)
    if source.path.suffix == ".json":
        raise InputError("not valid JSON", where=source.name)
    return _yaml(source)


def _json(source: Source) -> Structure | None:
    """Read JSON; comments and trailing commas, as templates have them, are let pass."""
    value = source.json
    notes: tuple[str, ...] = ()
    if value is None:
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


def _yaml(source: Source) -> Structure:
    if len(source.text) > MAX_YAML_BYTES:
        raise InputError("more than 1 MiB of YAML: not a config", where=source.name)
    converter = _Converter(source)
    notes = []
    try:
        loader = _Nodes(source.text)
        try:
            node = loader.get_node() if loader.check_node() else None
            if loader.check_node():
                notes.append(f"{source.name}: only the first YAML document is read")
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source.name}:{mark.line + 1}" if mark else source.name
        raise InputError(f"not valid YAML: {error.problem}", where=where) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"not valid YAML: {reason}", where=source.name) from None
    data = None if node is None else converter.convert(node, "", 0)
    if not isinstance(data, dict):
        raise InputError("the top level is no mapping", where=source.name)
    return Structure(
        data=data, syntax="yaml", lines=converter.lines, notes=(*notes, *converter.notes)
    )


class _Converter:
    """Turns nodes into plain values and collects lines and notes."""

    def __init__(self, source: Source) -> None:
        self._name = source.name
        self._count = 0
        self.lines: dict[str, int] = {}
        self.notes: list[str] = []

    def convert(self, node: yaml.Node, path: str, depth: int) -> Any:
        self._count += 1
        where = f"{self._name}:{node.start_mark.line + 1}"
        if self._count > MAX_NODES:
            raise InputError(f"more than {MAX_NODES} values (aliases expand too far)", where=where)
        if depth > MAX_DEPTH:
            raise InputError(f"nested deeper than {MAX_DEPTH} levels", where=where)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            self._tagged(node, "seq", path)
            return [self.convert(child, path, depth + 1) for child in node.value]
        if node.tag == _PLAIN:
            return plain_scalar(node.value)
        self._tagged(node, "str", path)
        return str(node.value)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> Any:
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._note(key_node, f"a key of {path or 'the top level'} is no text: left out")
                continue
            key = str(key_node.value)
            child = f"{path}.{key}" if path else key
            if key == "<<":
                for part in self._parts(self.convert(value_node, path, depth + 1)):
                    merged = {**part, **merged}
                continue
            if key in result:
                self._note(key_node, f"{child} stands twice; the last one is read")
            self.lines[child] = key_node.start_mark.line + 1
            result[key] = self.convert(value_node, child, depth + 1)
        if node.tag == f"{_STANDARD}set":
            return list(result)
        self._tagged(node, "map", path)
        return {**merged, **result}

    @staticmethod
    def _parts(value: Any) -> list[dict[str, Any]]:
        items = value if isinstance(value, list) else [value]
        return [item for item in items if isinstance(item, dict)]

    def _tagged(self, node: yaml.Node, expected: str, path: str) -> None:
        if node.tag not in (f"{_STANDARD}{expected}", "!"):
            name = node.tag.removeprefix(_STANDARD)
            self._note(node, f"{path}: the tag {name!r} is not acted on")

    def _note(self, node: yaml.Node, text: str) -> None:
        if len(self.notes) < 20:
            self.notes.append(f"{self._name}:{node.start_mark.line + 1}: {text}")
