"""The keys a spec may hold, their types and defaults, from the dataclasses of ``model.spec``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fsdp_doctor.model.spec import ProfileSpec

UNSET = object()
"""Default of a key that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a spec."""

    path: str
    """Dotted, e.g. ``config.fsdp2.reshard_after_forward``."""
    hint: Any
    """Its type, as annotated."""
    default: Any
    """``UNSET`` when it has none."""
    section: type[Any] | None
    """The dataclass of its children; None for a value."""
    optional: bool
    """Whether null is allowed."""


@cache
def spec_keys() -> Mapping[str, Key]:
    """Return every key of a spec, sections included, by dotted path."""
    return {key.path: key for key in _walk(ProfileSpec, "")}


def _walk(section: type[Any], prefix: str) -> Iterator[Key]:
    hints = get_type_hints(section)
    for item in fields(section):
        path = f"{prefix}{item.name}"
        hint = hints[item.name]
        members = get_args(hint) or (hint,)
        child = next((m for m in members if is_dataclass(m) and isinstance(m, type)), None)
        yield Key(
            path=path,
            hint=hint,
            default=_default(item),
            section=child,
            optional=NoneType in members,
        )
        if child is not None:
            yield from _walk(child, f"{path}.")


def _default(item: Any) -> Any:
    if item.default is not MISSING:
        return item.default
    return UNSET if item.default_factory is MISSING else item.default_factory()


def child_names(path: str) -> list[str]:
    """Return the names a section may hold (``""`` is the top level)."""
    prefix = f"{path}." if path else ""
    rest = [p.removeprefix(prefix) for p in spec_keys() if p.startswith(prefix)]
    return [name for name in rest if "." not in name]


def allowed_words(path: str) -> list[str]:
    """Return the literal values of a key, or none when it is not a choice."""
    key = spec_keys().get(path)
    if key is None:
        return []
    members = [key.hint, *get_args(key.hint)]
    return [w for m in members if get_origin(m) is Literal for w in get_args(m)]


def nearest(word: str, known: list[str]) -> str | None:
    """Return the known word closest to ``word``, or None when none is close."""
    by_folded = {k.lower(): k for k in known}
    longer = [k for folded, k in by_folded.items() if folded.startswith(word.lower())]
    if len(word) > 2 and len(longer) == 1:
        return longer[0]
    found = difflib.get_close_matches(word.lower(), list(by_folded), n=1, cutoff=0.5)
    return by_folded[found[0]] if found else None


def unknown_key_hint(path: str) -> str:
    """Return what to write instead of a key that does not exist."""
    parent, _, name = path.rpartition(".")
    here = child_names(parent)
    close = nearest(name, here)
    if close is None:
        homes = [p for p in spec_keys() if p.rpartition(".")[2] == name]
        if homes:
            return f"{name} belongs at: {', '.join(homes)}"
        return f"known here: {', '.join(here)}" if here else "no such section"
    return f"did you mean {close}?"


def leaf_values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of every key of a spec (or section of one) that holds no others.

    A section that is None is a value itself.
    """
    for item in fields(section):
        value = getattr(section, item.name)
        path = f"{prefix}{item.name}"
        if is_dataclass(value):
            yield from leaf_values(value, f"{path}.")
        else:
            yield path, value


def present_sections(spec: ProfileSpec) -> list[str]:
    """Return the paths of optional sections (``config.fsdp2.offload_policy``) that are given."""
    found = []
    for key in spec_keys().values():
        if key.section is not None and key.optional:
            value: Any = spec
            for name in key.path.split("."):
                value = getattr(value, name)
            if value is not None:
                found.append(key.path)
    return found
