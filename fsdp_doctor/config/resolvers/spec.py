"""Profile specs: this tool's own format, under torch's rules."""

from __future__ import annotations

from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.spec import written_spec_from_mapping
from fsdp_doctor.config.yaml_source import Places
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("torch",)
ASSUMED: dict[str, str] = {}


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of a spec that was read as native fields."""
    places = Places(
        source=native.format,
        lines={key: (f.file or native.format, f.line or 0) for key, f in native.fields.items()},
    )
    written = written_spec_from_mapping({"name": "spec", **(native.nested or {})}, places)
    return resolve_spec(written.spec, written.written, version)
