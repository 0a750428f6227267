"""Environment variables and package versions as fields of an effective config."""

from __future__ import annotations

from dataclasses import replace

from fsdp_doctor.model.config import ConfigValue, EffectiveConfig, NativeConfig

_CANONICAL = {
    "PYTORCH_CUDA_ALLOC_CONF": "env.alloc_conf",
    "PYTORCH_ALLOC_CONF": "env.alloc_conf",
    "CUDA_DEVICE_MAX_CONNECTIONS": "env.cuda_device_max_connections",
}


def variable_key(name: str) -> str:
    """Return the canonical key of an environment variable."""
    return _CANONICAL.get(name, f"env.{name}")


def with_environment(config: EffectiveConfig, native: NativeConfig) -> EffectiveConfig:
    """Add variables (``env.*``) and package versions (``packages.*``) that the config carries.

    A field that the resolver set itself stays as it is.
    """
    added: dict[str, ConfigValue] = {}
    for name, text in native.environment.items():
        added[variable_key(name)] = _value(_typed(text), "env", name)
    for name, text in native.packages.items():
        added[f"packages.{name}"] = _value(text, "file", name)
    if not added:
        return config
    return replace(config, fields={**added, **config.fields})


def _typed(text: str) -> str | int:
    return int(text) if text.isdecimal() and len(text) < 12 else text


def _value(value: str | int, source: str, native: str) -> ConfigValue:
    return ConfigValue(set=True, value=value, source=source, native=(native,), written=value)
