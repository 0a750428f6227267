"""Load profile specs: check every key, type and rule, and name the place of what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from fsdp_doctor.config.schema import (
    UNSET,
    allowed_words,
    nearest,
    spec_keys,
    unknown_key_hint,
)
from fsdp_doctor.config.validate import validate
from fsdp_doctor.config.yaml_source import Places, parse_value, read_yaml
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.spec import ProfileSpec

_AT = re.compile(r"^(?P<message>.*?)(?: - at `(?P<path>\$[^`]*)`)?$", re.DOTALL)
_YAML_1_1_BOOLEANS = frozenset({"yes", "no", "on", "off", "y", "n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSpec:
    """A spec, and which of its keys were written rather than defaulted."""

    spec: ProfileSpec
    written: Mapping[str, str]
    """Dotted path of each written value -> ``file`` or ``cli``."""


def load_spec(path: Path) -> ProfileSpec:
    """Read a spec from a YAML file. ``name`` defaults to the file's stem.

    Raises InputError with file, line and key path when anything about it is wrong.
    """
    return load_written_spec(path).spec


def load_written_spec(path: Path, overrides: Sequence[str] = ()) -> WrittenSpec:
    """Read a spec and note which keys the file holds; then set ``KEY=VALUE`` overrides.

    Raises InputError as ``load_spec`` does.
    """
    document = read_yaml(path)
    raw, places = _follow_config_file(document.data, document.places, path)
    raw.setdefault("name", path.stem)
    return written_spec_from_mapping(raw, places, overrides)


def written_spec_from_mapping(
    raw: Mapping[str, Any], source: str | Places, overrides: Sequence[str] = ()
) -> WrittenSpec:
    """Convert and check a mapping, and note which keys it holds.

    Raises InputError with the place and key path when anything about it is wrong.
    """
    places = source if isinstance(source, Places) else Places(source=source)
    spec = spec_from_mapping(raw, places)
    written = dict.fromkeys(_written_leaves(raw, ""), "file")
    if overrides:
        spec = apply_overrides(spec, overrides)
        written |= {split_override(text)[0]: "cli" for text in overrides}
    return WrittenSpec(spec=spec, written=written)


def spec_from_mapping(raw: Mapping[str, Any], source: str | Places) -> ProfileSpec:
    """Convert a mapping (of YAML or JSON values) to a checked spec.

    ``source`` names where it came from. Raises InputError with the place and the dotted key path:
    unknown keys, wrong types, and values torch would refuse.
    """
    places = source if isinstance(source, Places) else Places(source=source)
    _refuse_unknown_keys(raw, "", places)
    try:
        spec = msgspec.convert(raw, ProfileSpec)
    except msgspec.ValidationError as error:
        raise _type_error(str(error), raw, places) from None
    validate(spec, places)
    return spec


def spec_to_mapping(spec: ProfileSpec) -> dict[str, Any]:
    """Return a spec as plain values, without keys that hold their default.

    ``spec_from_mapping`` turns the result into an equal spec.
    """
    return _section_to_mapping(spec, "")


def _section_to_mapping(section: Any, prefix: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for item in fields(section):
        value = getattr(section, item.name)
        path = f"{prefix}{item.name}"
        default = spec_keys()[path].default
        if default is not UNSET and value == default and type(value) is type(default):
            continue
        if is_dataclass(value):
            result[item.name] = _section_to_mapping(value, f"{path}.")
        else:
            result[item.name] = list(value) if isinstance(value, (list, tuple)) else value
    return result


def apply_overrides(spec: ProfileSpec, overrides: Sequence[str]) -> ProfileSpec:
    """Return ``spec`` with ``KEY=VALUE`` texts set, e.g. ``config.fsdp2.blocks_per_unit=2``.

    The value is read as YAML. Raises InputError for an unknown key, a wrong type, or a spec that
    torch would refuse.
    """
    raw = spec_to_mapping(spec)
    lines = {}
    for text in overrides:
        path, value = split_override(text)
        _set_path(raw, path, value)
        lines[path] = (f"option {text}", 0)
    return spec_from_mapping(raw, Places(source="options", lines=lines))


def split_override(text: str) -> tuple[str, Any]:
    """Split ``KEY=VALUE`` and parse the value as YAML.

    Raises InputError when there is no ``=`` or the key is unknown.
    """
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise InputError(
            "not of the form KEY=VALUE",
            where=f"option {text}",
            hint="e.g. config.fsdp2.reshard_after_forward=false",
        )
    if path not in spec_keys() and not path.startswith("workload.model.kwargs."):
        raise InputError(f"unknown key {path}", where=f"option {text}", hint=_path_hint(path))
    return path, parse_value(value, f"option {text}")


def _path_hint(path: str) -> str:
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        prefix = ".".join(parts[:depth])
        if prefix not in spec_keys():
            return unknown_key_hint(prefix)
    return ""


def _set_path(raw: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    section = raw
    for name in parents:
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    section[last] = value


def _follow_config_file(
    raw: dict[str, Any], places: Places, path: Path
) -> tuple[dict[str, Any], Places]:
    """Replace ``config: file.yaml`` by that file's mapping (its path is relative to the spec)."""
    target = raw.get("config")
    if not isinstance(target, str):
        return raw, places
    try:
        document = read_yaml(path.parent / target)
    except InputError as error:
        raise InputError(str(error), where=places.where("config")) from None
    lines = {f"config.{key}": place for key, place in document.places.lines.items()}
    return {**raw, "config": document.data}, replace(places, lines={**places.lines, **lines})


def _refuse_unknown_keys(raw: Mapping[str, Any], prefix: str, places: Places) -> None:
    for name, value in raw.items():
        path = f"{prefix}{name}"
        key = spec_keys().get(path)
        if key is None or "." in str(name):
            raise InputError(
                f"unknown key {name!r}", where=places.where(path), hint=unknown_key_hint(path)
            )
        if key.section is not None and isinstance(value, Mapping):
            _refuse_unknown_keys(value, f"{path}.", places)


def _written_leaves(raw: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in raw.items():
        path = f"{prefix}{name}"
        key = spec_keys()[path]
        if key.section is None or not isinstance(value, Mapping):
            yield path
            continue
        if key.optional:
            yield path
        yield from _written_leaves(value, f"{path}.")


def _type_error(text: str, raw: Mapping[str, Any], places: Places) -> InputError:
    """Turn msgspec's message (``... - at `$.config.x` ``) into ours."""
    match = _AT.match(text)
    assert match is not None
    path = re.sub(r"\[.*?\]", "", match["path"] or "$").removeprefix("$").lstrip(".")
    message = match["message"]
    missing = re.match(r"Object missing required field `(\w+)`", message)
    if missing:
        child = f"{path}.{missing[1]}" if path else missing[1]
        words = allowed_words(child)
        hint = f"one of: {', '.join(words)}" if words else None
        return InputError(f"missing key {child}", where=places.where(path), hint=hint)
    value = _value_at(raw, path)
    return InputError(
        _plain_words(message, value), where=places.where(path), hint=_type_hint(path, value)
    )


def _plain_words(message: str, value: Any) -> str:
    if message.startswith("Invalid enum value"):
        return f"{value!r} is not a known value"
    message = re.sub(r"`([^`]*)`", _alternatives, message)
    shown = "" if isinstance(value, (dict, list)) or value is None else f": {value!r}"
    return f"{message[:1].lower()}{message[1:]}{shown}"


def _alternatives(match: re.Match[str]) -> str:
    words = {"object": "a mapping", "array": "a list", "str": "text", "float": "a number"}
    words |= {"int": "a whole number", "bool": "true or false"}
    return " or ".join(words.get(part.strip(), part.strip()) for part in match[1].split("|"))


def _type_hint(path: str, value: Any) -> str | None:
    words = allowed_words(path)
    if words and isinstance(value, str):
        close = nearest(value, words)
        start = f"did you mean {close}? " if close else ""
        return f"{start}one of: {', '.join(words)}"
    if isinstance(value, str) and value.lower() in _YAML_1_1_BOOLEANS:
        return f"YAML 1.2 reads {value} as text; write true or false"
    if isinstance(value, str) and re.fullmatch(r"[0-9]+(_[0-9]+)+", value):
        return f"write {value.replace('_', '')}"
    if value is None and path in spec_keys() and not spec_keys()[path].optional:
        return "remove the key to get the default"
    return None


def _value_at(raw: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        if not isinstance(raw, Mapping):
            return None
        raw = raw.get(name)
    return raw
