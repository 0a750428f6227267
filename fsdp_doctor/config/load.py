"""One side of a comparison: a spec file or a run directory, as an effective config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.sizes import model_sizes_from_shape
from fsdp_doctor.config.spec import WrittenSpec, load_written_spec, written_spec_from_mapping
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import EffectiveConfig
from fsdp_doctor.model.run import ModelSizes, RunManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """An effective config and the sizes of its model, where they are known."""

    config: EffectiveConfig
    sizes: ModelSizes | None


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a spec file, or the config of a recorded run, and resolve it.

    ``overrides`` are ``KEY=VALUE`` texts set on the spec. Raises InputError when it cannot be read,
    or when a run carries no config.
    """
    if path.is_dir():
        return _load_run(path, overrides)
    return _resolve(load_written_spec(path, overrides), None)


def _resolve(written: WrittenSpec, version: str | None) -> LoadedConfig:
    return LoadedConfig(
        config=resolve_spec(written.spec, written.written, version),
        sizes=model_sizes_from_shape(written.spec),
    )


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
    return _resolve(
        written_spec_from_mapping(manifest.spec, f"{path} (recorded spec)", overrides), version
    )


def _recorded(manifest: RunManifest, version: str | None) -> LoadedConfig:
    config = EffectiveConfig(
        format="run", framework="torch", version=version, fields=manifest.effective_config
    )
    return LoadedConfig(config=config, sizes=manifest.sizes)
