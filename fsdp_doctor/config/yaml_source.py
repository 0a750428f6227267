"""Read a YAML file that is not trusted, and remember on which line each key stands.

The C safe loader parses; scalars are resolved here by the YAML 1.2 core schema, because PyYAML's
YAML 1.1 reads ``1e-5`` as text, ``012`` as ten, ``1:30`` as ninety and ``no`` as false.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fsdp_doctor.errors import InputError

MAX_BYTES = 4 << 20
"""Largest file that is read, in bytes."""
MAX_NODES = 100_000
"""Most values a document may hold after its aliases are expanded."""
MAX_DEPTH = 64
"""Deepest nesting."""
_MAX_DIGITS = 40

_PLAIN_TAG = "!plain"
_TAG_PREFIX = "tag:yaml.org,2002:"
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True} | {
    "false": False,
    "False": False,
    "FALSE": False,
}
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class _NodeLoader(yaml.CSafeLoader):
    """Composes nodes only; marks scalars whose type is left to the schema."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _PLAIN_TAG
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where each key path of a document was written."""

    source: str
    """File name, or what else the document came from."""
    lines: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Dotted key path -> file and line (from 1)."""

    def where(self, path: str) -> str:
        """Return ``file:line: path``; the line of the nearest enclosing key, where there is one."""
        parent = path
        while parent and parent not in self.lines:
            parent = parent.rpartition(".")[0]
        file, line = self.lines.get(parent, (self.source, 0))
        place = f"{file}:{line}" if line else file
        return f"{place}: {path}" if path else place


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlDocument:
    """A mapping read from YAML, with the place of every key."""

    data: dict[str, Any]
    places: Places


def read_yaml(path: Path) -> YamlDocument:
    """Read one YAML file whose top level is a mapping.

    Raises InputError, naming file and line, when the file is missing, a directory, too large,
    empty, not UTF-8, not YAML, holds duplicate keys, or something other than a mapping.
    """
    text = _read_text(path)
    if not text.strip():
        raise InputError(
            "the file is empty", where=str(path), hint="the least is: config: {strategy: fsdp2}"
        )
    converter = _Converter(str(path))
    data = converter.convert(_compose(text, str(path)))
    if not isinstance(data, dict):
        raise InputError(
            f"the top level is {_kind_name(data)}, not a mapping",
            where=str(path),
            hint="write 'key: value' lines",
        )
    return YamlDocument(data=data, places=Places(source=str(path), lines=converter.lines))


def parse_value(text: str, source: str) -> Any:
    """Parse one YAML value such as ``false``, ``1e-5`` or ``[A, B]``.

    Raises InputError, starting with ``source``, when it is not YAML.
    """
    if not text.strip():
        return None
    return _Converter(source).convert(_compose(text, source))


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise InputError("is a directory", where=str(path), hint="give a YAML file")
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else None
        raise InputError(error.strerror or str(error), where=str(path), hint=hint) from None
    if len(raw) > MAX_BYTES:
        raise InputError(
            f"larger than {MAX_BYTES >> 20} MiB", where=str(path), hint="this is not a spec"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"not UTF-8 text (byte 0x{raw[error.start]:02x})",
            where=f"{path}:{line}",
            hint="save it as UTF-8",
        ) from None


def _compose(text: str, source: str) -> yaml.Node:
    try:
        loader = _NodeLoader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = error.problem or "not valid YAML"
        raise InputError(f"not valid YAML: {problem}", where=where, hint=error.context) from None
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"not valid YAML: {reason}", where=source) from None
    if node is None:
        raise InputError("holds comments only, no value", where=source)
    assert isinstance(node, yaml.Node)
    return node


class _Converter:
    """Turns nodes into plain values and collects the line of each key path."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[str, tuple[str, int]] = {}
        self._nodes = 0

    def convert(self, node: yaml.Node, path: str = "", depth: int = 0) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise self._error(f"more than {MAX_NODES} values (aliases expand too far)", node, path)
        if depth > MAX_DEPTH:
            raise self._error(f"nested deeper than {MAX_DEPTH} levels", node, path)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(child, path, depth + 1) for child in node.value]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error("a key must be plain text", key_node, path)
            key = str(key_node.value)
            child = f"{path}.{key}" if path else key
            if key in result:
                first = self.lines[child][1]
                raise self._error(f"duplicate key (first on line {first})", key_node, child)
            self.lines[child] = (self.source, key_node.start_mark.line + 1)
            result[key] = self.convert(value_node, child, depth + 1)
        return result

    def _scalar(self, node: yaml.Node, path: str) -> Any:
        text = str(node.value)
        if node.tag == _PLAIN_TAG:
            if len(text) > _MAX_DIGITS and (_DECIMAL.fullmatch(text) or _FLOAT.fullmatch(text)):
                raise self._error("the number has too many digits", node, path)
            return plain_scalar(text)
        if node.tag == f"{_TAG_PREFIX}str":
            return text
        name = node.tag.removeprefix(_TAG_PREFIX)
        raise self._error(f"the tag {name!r} is not allowed", node, path)

    def _error(self, message: str, node: yaml.Node, path: str) -> InputError:
        place = f"{self.source}:{node.start_mark.line + 1}"
        return InputError(message, where=f"{place}: {path}" if path else place)


def plain_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar by the YAML 1.2 core schema.

    Source: YAML 1.2.2, section 10.3.2 (``012`` is twelve; ``0o14`` is octal; no sexagesimal).
    """
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text) or _HEXADECIMAL.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


def _kind_name(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"the value {value!r}"
