"""One side of a comparison: a config file of any framework, a spec, or a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_doctor.config.loaders import load_native
from fsdp_doctor.config.model_size import model_sizes
from fsdp_doctor.config.resolvers import resolve
from fsdp_doctor.config.resolvers.draft import HIDDEN
from fsdp_doctor.config.versions import version_for
from fsdp_doctor.config.yaml_source import parse_value
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import ConfigValue, EffectiveConfig, NativeConfig, NativeField
from fsdp_doctor.model.run import ModelSizes, RunManifest

__all__ = [
    "Known",
    "LoadedConfig",
    "load_config",
    "load_native",
    "resolve",
    "resolve_native",
    "split_paths",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the user tells of the model and the ranks, for a config that does not."""

    params: int | None = None
    layers: int | None = None
    hidden: int | None = None
    world_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """An effective config and the sizes of its model, where they are known."""

    config: EffectiveConfig
    sizes: ModelSizes | None
    native: NativeConfig | None = None
    """What was written; None for a recorded run."""


def load_config(
    path: Path | str,
    overrides: Sequence[str] = (),
    fmt: str | None = None,
    versions: Mapping[str, str] | None = None,
    known: Known | None = None,
) -> LoadedConfig:
    """Read and resolve a config: a file, files joined by ``+`` (``a.yaml+ds.json``), a run.

    ``overrides`` are ``KEY=VALUE`` texts set on the native keys, ``fmt`` the first file's format,
    ``versions`` the packages' (see ``versions.parse_versions``), ``known`` what a config does not
    tell. Raises InputError when something cannot be read, or when a run carries no config.
    """
    paths = split_paths(path)
    if len(paths) == 1 and paths[0].is_dir():
        return _load_run(paths[0], overrides)
    native = load_native(paths, fmt)
    if native.format == "spec":
        return _load_spec(native, paths[0], overrides, versions or {})
    return resolve_native(_overridden(native, overrides), versions, known)


def resolve_native(
    native: NativeConfig,
    versions: Mapping[str, str] | None = None,
    known: Known | None = None,
) -> LoadedConfig:
    """Resolve a config that was read, by the rules of its framework (not a spec)."""
    known = known or Known()
    native = replace(native, packages={**native.packages, **(versions or {})})
    version = version_for(native.framework, versions or {}, native.packages)
    config = _with_world(resolve(_with_hidden(native, known.hidden), version), known.world_size)
    sizes = model_sizes(known.params, known.layers, known.hidden, config.fields)
    return LoadedConfig(config=config, sizes=sizes, native=native)


def _with_hidden(native: NativeConfig, hidden: int | None) -> NativeConfig:
    if hidden is None:
        return native
    given = {HIDDEN: NativeField(value=hidden, source="cli")}
    return replace(native, fields={**native.fields, **given})


def _with_world(config: EffectiveConfig, size: int | None) -> EffectiveConfig:
    """Return the config with its shards over ``size`` ranks, unless it says over how many."""
    strategy = config.fields.get("sharding.strategy")
    if size is None or strategy is None or "sharding.shard_size" in config.fields:
        return config
    shard = ConfigValue(set=True, value=size, source="derived", reason="--world-size")
    return replace(config, fields={**config.fields, "sharding.shard_size": shard})


def split_paths(path: Path | str) -> list[Path]:
    """Return the files of ``a.yaml+ds.json``; a file of just that name is one."""
    whole = Path(path)
    text = str(path)
    if "+" not in text or whole.exists():
        return [whole]
    return [Path(part) for part in text.split("+") if part]


def _load_spec(
    native: NativeConfig, path: Path, overrides: Sequence[str], versions: Mapping[str, str]
) -> LoadedConfig:
    from fsdp_doctor.config.environment import with_environment
    from fsdp_doctor.config.resolvers.torch import resolve_spec
    from fsdp_doctor.config.sizes import model_sizes_from_shape
    from fsdp_doctor.config.spec import load_written_spec

    written = load_written_spec(path, overrides)
    version = version_for("torch", versions, native.packages)
    config = resolve_spec(written.spec, written.written, version)
    return LoadedConfig(
        config=with_environment(config, native),
        sizes=model_sizes_from_shape(written.spec),
        native=native,
    )


def _overridden(native: NativeConfig, overrides: Sequence[str]) -> NativeConfig:
    if not overrides:
        return native
    fields = dict(native.fields)
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError("not of the form KEY=VALUE", where=f"option {text}")
        parsed: Any = parse_value(value, f"option {text}")
        parents = {key[:end] for end in range(len(key)) if key[end] == "."}
        fields = {
            other: field
            for other, field in fields.items()
            if not other.startswith(f"{key}.") and other not in parents
        }
        fields[key] = NativeField(value=parsed, source="cli")
    return replace(native, fields=fields)


def _load_run(path: Path, overrides: Sequence[str]) -> LoadedConfig:
    from fsdp_doctor.runs import load_launches

    manifest = load_launches(path)[0].manifest
    torch_version = manifest.environment.get("torch")
    version = torch_version if isinstance(torch_version, str) else None
    if manifest.effective_config and not overrides:
        return _recorded(manifest, version)
    if manifest.spec is None:
        raise InputError(
            "the run carries no spec" if overrides else "the run carries no config",
            where=str(path),
            hint="it was recorded from a training loop of its own; give a spec file instead",
        )
    return _run_spec(manifest.spec, path, overrides, version)


def _run_spec(
    spec: Mapping[str, Any], path: Path, overrides: Sequence[str], version: str | None
) -> LoadedConfig:
    from fsdp_doctor.config.resolvers.torch import resolve_spec
    from fsdp_doctor.config.sizes import model_sizes_from_shape
    from fsdp_doctor.config.spec import written_spec_from_mapping

    written = written_spec_from_mapping(spec, f"{path} (recorded spec)", overrides)
    return LoadedConfig(
        config=resolve_spec(written.spec, written.written, version),
        sizes=model_sizes_from_shape(written.spec),
    )


def _recorded(manifest: RunManifest, version: str | None) -> LoadedConfig:
    config = EffectiveConfig(
        format="run", framework="torch", version=version, fields=manifest.effective_config
    )
    return LoadedConfig(config=config, sizes=manifest.sizes)
