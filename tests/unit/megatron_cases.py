"""Configs of Megatron's families from short texts, resolved and compared."""

from __future__ import annotations

from pathlib import Path

from fsdp_doctor.config.diff import diff_configs
from fsdp_doctor.config.loaders.base import Loader, Source, read_source
from fsdp_doctor.config.resolvers import resolve
from fsdp_doctor.model.config import ConfigDiff, EffectiveConfig, NativeConfig

FIXTURES = Path(__file__).parents[1] / "fixtures" / "megatron"
SHARED = Path(__file__).parents[3] / "shared"


def source(text: str, name: str = "config.txt") -> Source:
    """Return a source that holds ``text``."""
    return Source(path=Path(name), text=text)


def fixture(name: str) -> Source:
    """Return a fixture file."""
    return read_source(FIXTURES / name)


def effective(loader: Loader, text: str | Source, version: str | None = None) -> EffectiveConfig:
    """Load and resolve a text or source."""
    given = source(text) if isinstance(text, str) else text
    return resolve(loader.load(given), version)


def lost_keys(native: NativeConfig, config: EffectiveConfig) -> set[str]:
    """Return the native keys that the effective config does not name."""
    named = {path for field in config.fields.values() for path in field.native}
    return set(native.fields) - named - set(config.fields)


def changed(diff: ConfigDiff) -> dict[str, tuple[object, object]]:
    """Return the changed keys with their values before and after."""
    return {change.key: (change.a.value, change.b.value) for change in diff.changed}


def inert(diff: ConfigDiff, side: str | None = None) -> set[str]:
    """Return the keys that are written and do nothing, on one side or any."""
    return {field.key for field in diff.inert if side in (None, field.side)}


def compare(
    loader: Loader, a: str | Source, b: str | Source, version: str | None = None
) -> ConfigDiff:
    """Return the difference between two configs of one format."""
    return diff_configs(effective(loader, a, version), effective(loader, b, version))
