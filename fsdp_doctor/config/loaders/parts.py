"""Several files that are one config: overlays, environment files, files that a config names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_doctor.config.loaders.base import Source, read_source
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import NativeConfig

REFERENCES: dict[str, tuple[str, ...]] = {
    "accelerate": ("deepspeed_config.deepspeed_config_file",),
    "hf-trainer": ("deepspeed",),
    "llama-factory": ("deepspeed", "dist_config.config_file"),
    "axolotl": ("deepspeed",),
}
"""Framework -> native keys that name a DeepSpeed JSON."""
ENVIRONMENT = "environment"
"""Framework of a file that holds environment variables only."""


def join(configs: Sequence[NativeConfig]) -> NativeConfig:
    """Return the configs as one: the first that is no environment file leads."""
    main = next((c for c in configs if c.framework != ENVIRONMENT), configs[0])
    for other in configs:
        if other is not main:
            main = _with(main, other)
    return main


def _with(main: NativeConfig, other: NativeConfig) -> NativeConfig:
    combined = replace(
        main,
        environment={**main.environment, **other.environment},
        packages={**main.packages, **other.packages},
        unresolved=(*main.unresolved, *other.unresolved),
    )
    if other.framework == ENVIRONMENT:
        return combined
    if other.framework == main.framework:
        return replace(
            combined,
            fields={**main.fields, **other.fields},
            unknown=tuple(dict.fromkeys((*main.unknown, *other.unknown))),
            parts=(*main.parts, *other.parts),
        )
    return replace(combined, parts=(*main.parts, other, *other.parts))


def follow_references(
    config: NativeConfig, path: Path, load: Callable[[Source], NativeConfig]
) -> NativeConfig:
    """Add the DeepSpeed JSON that a config names, where it lies beside the config.

    Relative paths only. One that is not there is told in ``unresolved``.
    """
    if any(part.framework == "deepspeed" for part in config.parts):
        return config
    for key in REFERENCES.get(config.framework, ()):
        field = config.fields.get(key)
        named = field.value if field is not None else None
        if not isinstance(named, str) or not named.endswith((".json", ".yaml", ".yml")):
            continue
        part = _referenced(named, path.parent, load)
        if part is not None:
            return _with(config, part)
        note = f"{key}: {named} was not found beside {path.name}; give it as {path.name}+FILE"
        return replace(config, unresolved=(*config.unresolved, note))
    return config


def _referenced(
    named: str, folder: Path, load: Callable[[Source], NativeConfig]
) -> NativeConfig | None:
    if Path(named).is_absolute():
        return None
    for candidate in (folder / named, Path(named)):
        try:
            if candidate.is_file():
                part = load(read_source(candidate))
                return part if part.framework == "deepspeed" else None
        except (InputError, OSError, ValueError):
            return None
    return None
