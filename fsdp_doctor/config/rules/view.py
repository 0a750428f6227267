"""A config as conditions see it: keys by name, defaults, environment, job and versions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from fsdp_doctor.config.rules.evaluate import Unknown, number
from fsdp_doctor.config.rules.schema import Default, Vocabulary
from fsdp_doctor.config.version_range import parse_range
from fsdp_doctor.config.versions import package_of
from fsdp_doctor.model.config import ConfigValue, NativeConfig, NativeField

_MAX_KEY = 300
_MAX_SCOPES = 64
"""Roles of one config; further ones are not looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a config does not say about the job it is for."""

    gpu_arch: float | None = None
    """CUDA compute capability: 8.0 A100, 9.0 Hopper, 10.0 Blackwell."""
    world_size: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version, as the user said it."""


class View:
    """Looks names up in one config, within one scope of it.

    Bare names are native keys. ``env.X`` is an environment variable, ``effective.X`` a canonical
    field, ``job.gpu_arch`` and ``job.world_size`` what the user said.
    """

    def __init__(
        self,
        native: NativeConfig,
        effective: Mapping[str, ConfigValue],
        job: Job,
        vocabulary: Vocabulary,
        scope: str = "",
    ) -> None:
        self._native = native
        self._effective = effective
        self._job = job
        self._vocabulary = vocabulary
        self._scope = scope

    @property
    def framework(self) -> str:
        """The framework whose keys these are."""
        return self._native.framework

    def value(self, name: str) -> Any:
        """Return a value as written, else its default; None where it is unset."""
        kind, _, rest = name.partition(".")
        if kind == "env" and rest:
            return self._environment(rest)
        if kind == "job":
            return self._job_value(name, rest)
        if kind == "effective":
            found = self._effective.get(rest)
            return found.value if found is not None and found.set else None
        key = self.key(name)
        written = self._native.fields.get(key)
        return self._default(name) if written is None else written.value

    def _job_value(self, name: str, rest: str) -> Any:
        """Return what the user said of the job, else what the config says of its ranks."""
        known = getattr(self._job, rest, None)
        if known is None and rest == "world_size":
            found = self._effective.get("world.size")
            known = number(found.value) if found is not None and found.set else None
        return Unknown(frozenset({name})) if known is None else known

    def is_written(self, name: str) -> bool:
        """Return whether the key (or variable) is in the config, perhaps as null."""
        kind, _, rest = name.partition(".")
        if kind == "env":
            return self._environment(rest) is not None
        if kind == "effective":
            return rest in self._effective
        return self.field(name) is not None

    def has_key(self, pattern: str) -> bool:
        """Return whether a written native key matches a pattern with ``*``."""
        return any(fnmatchcase(key, self._scope + pattern) for key in self._native.fields)

    def in_range(self, package: str, versions: str) -> bool | Unknown:
        """Return whether the version of a package is in a range, as far as it is known."""
        version = self.version(package)
        if version is None:
            return Unknown(frozenset({f"version.{package}"}))
        return version in parse_range(versions)

    def version(self, package: str | None = None) -> str | None:
        """Return the version of a package (None: of the framework), or None.

        As the user said, as the config says, as follows from the framework's, or as assumed.
        """
        own = package_of(self._native.framework)
        package = package or self._vocabulary.package or own
        for known in (self._job.versions, self._native.packages):
            if package in known:
                return known[package]
        if package in (self._vocabulary.package, own, self._native.framework):
            return self._native.version or self._vocabulary.newest
        table = self._vocabulary.implies.get(package, ())
        return _chosen(table, self.version()) if table else None

    def is_assumed(self) -> bool:
        """Return whether the framework's version is only assumed."""
        own = self._vocabulary.package or package_of(self._native.framework)
        known = own in self._job.versions or own in self._native.packages
        return not known and self._native.version is None and self._vocabulary.newest is not None

    def key(self, name: str) -> str:
        """Return the native key of a name: the written one, else where it would stand."""
        candidates = list(self._candidates(name))
        return next((key for key in candidates if key in self._native.fields), candidates[0])

    def field(self, name: str) -> NativeField | None:
        """Return a native field by name, or None where it is not written."""
        return self._native.fields.get(self.key(name))

    def _candidates(self, name: str) -> Iterator[str]:
        for key in self._vocabulary.names.get(name, ()):
            if self._scope:
                yield self._scope + key
            yield key
        for pattern in self._vocabulary.lookup:
            key = pattern.replace("{}", name)
            if self._scope:
                yield self._scope + key
            yield key

    def _default(self, name: str) -> Any:
        return _chosen(self._vocabulary.defaults.get(name, ()), self.version())

    def _environment(self, name: str) -> Any:
        if name in self._native.environment:
            return self._native.environment[name]
        found = self._native.fields.get(f"env.{name}")
        return found.value if found is not None else None


def _chosen(defaults: tuple[Default, ...], version: str | None) -> Any:
    """Return the first default whose versions hold; without a version, the last one (newest)."""
    if version is None:
        return defaults[-1].value if defaults else None
    return next((entry.value for entry in defaults if version in entry.versions), None)


def scopes_of(native: NativeConfig, patterns: tuple[str, ...]) -> list[str]:
    """Return the prefixes of native keys that match; ``""`` is the top level.

    A pattern ends with a dot: ``*.fsdp_config.`` finds ``actor.fsdp_config.`` of
    ``actor.fsdp_config.offload_policy``.
    """
    found = dict.fromkeys([""] if "" in patterns else [])
    wanted = [pattern for pattern in patterns if pattern]
    if wanted:
        for key in native.fields:
            for dot in re.finditer(r"\.", key[:_MAX_KEY]):
                prefix = key[: dot.end()]
                if prefix not in found and any(fnmatchcase(prefix, p) for p in wanted):
                    found[prefix] = None
            if len(found) > _MAX_SCOPES:
                break
    return list(found)
