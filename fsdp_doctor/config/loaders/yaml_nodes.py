"""YAML that is not trusted, as plain values: no tag is acted on, aliases expand up to a limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.yaml_source import plain_scalar
from fsdp_doctor.errors import InputError

MAX_NODES = 100_000
"""Most values of one config, aliases expanded."""
MAX_DEPTH = 64
"""Deepest nesting."""
MAX_TEXT = 1 << 20
"""Longest text of YAML or TOML, whose parsers are slow; no real config comes near."""

_STANDARD = "tag:yaml.org,2002:"
_PLAIN = "!plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlContent:
    """A mapping, the line of each dotted key, and what was not acted on."""

    data: dict[str, Any]
    lines: dict[str, int]
    notes: tuple[str, ...]


class _Nodes(yaml.CSafeLoader):
    """Composes nodes only; marks scalars whose type is left to the schema."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _PLAIN
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]


def read_yaml_nodes(source: Source) -> YamlContent:
    """Return what the first YAML document of ``source`` holds.

    Raises InputError when it is no mapping, broken, or beyond the limits.
    """
    if len(source.text) > MAX_TEXT:
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
    return YamlContent(data=data, lines=converter.lines, notes=(*notes, *converter.notes))


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
