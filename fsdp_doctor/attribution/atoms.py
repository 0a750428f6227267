"""From two specs and their diff to the fields that can be flipped, and the specs between them.

What is flipped as one is an *atom*: changed fields that the same keys of the spec write, or keys
that are valid only together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from fsdp_doctor.attribution.design import Point
from fsdp_doctor.config.schema import spec_keys
from fsdp_doctor.config.spec import spec_from_mapping, spec_to_mapping
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import ConfigChange, ConfigDiff
from fsdp_doctor.model.spec import ProfileSpec

_PRESENT = object()
"""Value of an optional section that is there."""
_UNCOUNTED = frozenset({"name", "steps.warmup", "steps.timed", "steps.kernel_profile"})
"""Keys that say how a run is called and how long it is, not what it trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Atom:
    """What is flipped as one."""

    keys: tuple[str, ...]
    """Changed fields, by their canonical names."""
    paths: tuple[str, ...]
    """Keys of the spec that write them."""
    inert: bool
    """Whether no effect on memory is known of any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flips:
    """Two specs, and every spec between them."""

    a: ProfileSpec
    b: ProfileSpec
    atoms: tuple[Atom, ...]
    beside: tuple[str, ...]
    """Keys that differ and belong to no changed field: without effect, they stay as in A."""
    not_in_spec: tuple[str, ...]
    """Changed fields that no key of the specs writes: variables, versions."""

    @property
    def inert(self) -> frozenset[int]:
        """Return the atoms believed to leave memory alone."""
        return frozenset(n for n, atom in enumerate(self.atoms) if atom.inert)

    def keys_of(self, point: Point) -> tuple[str, ...]:
        """Return the changed fields of a point."""
        return tuple(key for n in sorted(point) for key in self.atoms[n].keys)

    def spec_at(self, point: Point) -> ProfileSpec:
        """Return A with the atoms of ``point`` flipped; A and B themselves at the ends.

        Raises InputError for a combination that is not valid.
        """
        if not point:
            return self.a
        if len(point) == len(self.atoms):
            return self.b
        return _with_paths(self.a, self.b, self._paths(point))

    def overrides_at(self, point: Point) -> tuple[str, ...]:
        """Return what turns A into the spec of ``point``, as ``KEY=VALUE``."""
        paths = self._paths(point)
        if len(point) == len(self.atoms):
            paths |= {path for path in self.beside if path not in _UNCOUNTED}
        target = _leaves(self.b)
        start = _leaves(self.a)
        gone = {
            path
            for path, value in start.items()
            if value is _PRESENT
            and not _still_there(path, {p: v for p, v in start.items() if p not in paths}, target)
        }
        told = {p for p in paths if not any(p.startswith(f"{section}.") for section in gone)}
        return tuple(
            f"{path}={_written(_value_or_default(path, target))}"
            for path in sorted(told | gone)
            if target.get(path) is not _PRESENT
        )

    def _paths(self, point: Point) -> set[str]:
        return {path for n in point for path in self.atoms[n].paths}


def find_flips(a: ProfileSpec, b: ProfileSpec, diff: ConfigDiff) -> Flips:
    """Return the atoms of the difference between two specs; ``diff`` is that of their fields."""
    differing = _differing(a, b)
    groups: list[tuple[list[ConfigChange], set[str]]] = []
    outside = []
    for change in (*diff.changed, *diff.unknown):
        paths = _paths_of(change, differing)
        if not paths:
            outside.append(change.key)
            continue
        joined = [group for group in groups if group[1] & paths]
        groups = [group for group in groups if not group[1] & paths]
        changes = [c for group in joined for c in group[0]] + [change]
        groups.append((changes, paths.union(*(group[1] for group in joined))))
    atoms = [_atom(changes, paths) for changes, paths in groups]
    claimed = {path for _, paths in groups for path in paths}
    beside = tuple(path for path in differing if path not in claimed)
    flips = Flips(
        a=a, b=b, atoms=tuple(atoms), beside=beside, not_in_spec=_unclaimed(outside, atoms)
    )
    return _joined_where_invalid(flips)


def _unclaimed(keys: Sequence[str], atoms: Sequence[Atom]) -> tuple[str, ...]:
    known = {key for atom in atoms for key in atom.keys}
    return tuple(key for key in keys if key not in known)


def _atom(changes: Sequence[ConfigChange], paths: set[str]) -> Atom:
    effects = [effect for change in changes for effect in change.effects]
    known = all(change.effects or change.step_time is not None for change in changes)
    return Atom(
        keys=tuple(change.key for change in changes),
        paths=tuple(sorted(paths)),
        inert=known and all(e.direction == "none" or e.bytes == 0 for e in effects),
    )


def _paths_of(change: ConfigChange, differing: Sequence[str]) -> set[str]:
    """Return the differing keys that write a field: its own first key, else those it depends on."""
    natives = [*change.a.native[:1], *change.b.native[:1]]
    own = {path for path in differing if any(_within(path, native) for native in natives)}
    every = [*change.a.native, *change.b.native]
    return own or {path for path in differing if any(_within(path, native) for native in every)}


def _within(path: str, native: str) -> bool:
    return path == native or path.startswith(f"{native}.")


def _differing(a: ProfileSpec, b: ProfileSpec) -> list[str]:
    x, y = _leaves(a), _leaves(b)
    return [p for p in dict.fromkeys((*x, *y)) if not _same(p, x, y)]


def _same(path: str, x: Mapping[str, Any], y: Mapping[str, Any]) -> bool:
    value, other = _value_or_default(path, x), _value_or_default(path, y)
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _value_or_default(path: str, leaves: Mapping[str, Any]) -> Any:
    if path in leaves:
        return leaves[path]
    key = spec_keys().get(path)
    return None if key is None or key.section is not None else key.default


def _leaves(spec: ProfileSpec) -> dict[str, Any]:
    """Return the values that a spec holds, by dotted key; defaults are left out."""
    return dict(_walk(spec_to_mapping(spec), ""))


def _walk(raw: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in raw.items():
        path = f"{prefix}{name}"
        key = spec_keys()[path]
        if key.section is None or not isinstance(value, Mapping):
            yield path, value
            continue
        if key.optional:
            yield path, _PRESENT
        yield from _walk(value, f"{path}.")


def _with_paths(a: ProfileSpec, b: ProfileSpec, paths: set[str]) -> ProfileSpec:
    leaves, target = _leaves(a), _leaves(b)
    for path in paths:
        if path in target:
            leaves[path] = target[path]
        else:
            leaves.pop(path, None)
    raw: dict[str, Any] = {}
    for path, value in leaves.items():
        if value is _PRESENT and not _still_there(path, leaves, target):
            continue
        *parents, last = path.split(".")
        section = raw
        for name in parents:
            section = section.setdefault(name, {})
        if value is _PRESENT:
            section.setdefault(last, {})
        else:
            section[last] = value
    return spec_from_mapping(raw, "the specs between A and B")


def _still_there(path: str, leaves: Mapping[str, Any], target: Mapping[str, Any]) -> bool:
    """Return whether an optional section remains: B has it too, or something is left in it."""
    return path in target or any(other.startswith(f"{path}.") for other in leaves)


def _written(value: Any) -> str:
    """Return a value as YAML reads it back: JSON is YAML."""
    if isinstance(value, str) and value.replace("_", "a").isalnum() and value[0].isalpha():
        return value
    return msgspec.json.encode(value).decode()


def _joined_where_invalid(flips: Flips) -> Flips:
    """Join atoms that are valid only together: such as the two sizes of a mesh."""
    atoms = list(flips.atoms)
    number = 0
    while number < len(atoms) and len(atoms) > 1:
        current = replace(flips, atoms=tuple(atoms))
        if _valid_at_an_end(current, frozenset([number])):
            number += 1
            continue
        partner = next(
            (
                other
                for other in range(len(atoms))
                if other != number and _valid_at_an_end(current, frozenset([number, other]))
            ),
            None,
        )
        if partner is None:
            number += 1
            continue
        low, high = sorted((number, partner))
        atoms[low] = _merged(atoms[low], atoms[high])
        del atoms[high]
        number = 0
    return replace(flips, atoms=tuple(atoms))


def _merged(x: Atom, y: Atom) -> Atom:
    return Atom(keys=(*x.keys, *y.keys), paths=(*x.paths, *y.paths), inert=x.inert and y.inert)


def _valid_at_an_end(flips: Flips, group: Point) -> bool:
    everything = frozenset(range(len(flips.atoms)))
    return any(_is_valid(flips, point) for point in (group, everything - group))


def _is_valid(flips: Flips, point: Point) -> bool:
    try:
        flips.spec_at(point)
    except InputError:
        return False
    return True
