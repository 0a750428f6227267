"""Effective configurations and what differs between two of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["up", "down", "none", "either"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigValue:
    """One field after the framework's own rules were applied."""

    set: bool
    """False: unset, which differs from every value."""
    value: Any = None
    source: str = "default"
    """file, cli, env, default, derived or runtime."""
    effective: bool = True
    """False: the framework does not act on it in this config (inert)."""
    reason: str | None = None
    """Why it is inert, or how it was derived."""
    native: tuple[str, ...] = ()
    """Native keys it came from, e.g. ``config.fsdp2.reshard_after_forward``."""
    written: Any = None
    """The native value as written (``FULL_SHARD``, 25), before it was normalised; None when it
    was not written, or written as null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeField:
    """One value as someone wrote it, under the framework's own key."""

    value: Any
    source: Literal["file", "cli", "env", "dump"] = "file"
    """``dump``: printed by the framework itself, after its own rules."""
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig:
    """What a config file, command line or dump says, before any rule is applied."""

    format: str
    """Name of the loader, e.g. ``megatron_args``."""
    framework: str
    """Whose rules apply, e.g. ``megatron-lm``, ``accelerate``, ``deepspeed``."""
    fields: dict[str, NativeField]
    """Flat: dotted native keys (``fsdp_config.fsdp_version``, ``--bf16`` as ``bf16``)."""
    version: str | None = None
    """The framework's version, where the file or dump tells it."""
    unknown: tuple[str, ...] = ()
    """Keys that the framework does not know, as far as this tool knows it; they are in ``fields``
    too."""
    unresolved: tuple[str, ...] = ()
    """What could not be known without running something, e.g. a shell variable, each with its
    place."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that the config sets."""
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of packages that the config or dump names."""
    nested: Any = None
    """The parsed structure, where there is one."""
    parts: tuple[NativeConfig, ...] = ()
    """Configs that were given beside this one (``a.yaml+ds.json``) and belong to another
    framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A validity rule that a config breaks."""

    rule: str
    severity: Literal["error", "warning", "note"]
    """error: the job stops or computes wrong numbers; warning: silently not what was asked for;
    note: without effect."""
    fields: tuple[str, ...]
    values: dict[str, Any]
    message: str
    fix: str
    versions: str
    """Versions of the framework for which the rule holds, e.g. ``>=0.18,<0.20``."""
    source: str
    file: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveConfig:
    """All fields of a config, keyed canonically (``sharding.strategy``, ``batch.micro``, ...)."""

    format: str
    framework: str
    version: str | None
    fields: dict[str, ConfigValue]
    resolved: bool = True
    """False: there is no resolver for this framework yet; the fields are the native ones."""
    assumed: str | None = None
    """Why this version was assumed, and what would differ in others; None: it is known."""
    unknown: tuple[str, ...] = ()
    """Native keys that the framework does not know."""
    unresolved: tuple[str, ...] = ()
    """As in NativeConfig."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What a change of one field does to one memory category."""

    category: str
    direction: Direction
    bytes: int | None
    """Signed bytes per rank, or None when only the sign is known."""
    phase: str | None
    """Phase in which it shows, or None for all."""
    reason: str
    source: str
    """Where the formula or sign comes from: file and version, paper, or recorded run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeEffect:
    """Direction in which a change moves step time."""

    direction: Direction
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChange:
    """One field that differs."""

    key: str
    a: ConfigValue
    b: ConfigValue
    effects: tuple[Effect, ...] = ()
    step_time: StepTimeEffect | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InertField:
    """A field that is written down but does nothing."""

    key: str
    side: Literal["a", "b", "both"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDiff:
    """What really changed, what only looks changed, what is inert."""

    a: EffectiveConfig
    b: EffectiveConfig
    changed: tuple[ConfigChange, ...]
    cosmetic: tuple[ConfigChange, ...]
    """Differ as written, equal in effect (names, paths, equal defaults), or irrelevant to memory
    and time."""
    inert: tuple[InertField, ...]
    unknown: tuple[ConfigChange, ...] = field(default=())
    """Differ, and this tool has no knowledge of their effect."""
