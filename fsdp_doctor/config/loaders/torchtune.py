"""torchtune's YAML."""

from __future__ import annotations

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of
from fsdp_doctor.model.config import NativeConfig

FORMAT = "torchtune"


def detect(source: Source) -> int:
    """Components named by ``_component_``."""
    data = mapping_of(source)
    if not data or "_component_" not in source.text:
        return 0
    named = [v for v in data.values() if isinstance(v, dict) and "_component_" in v]
    return 98 if named else 50


def load(source: Source) -> NativeConfig:
    """Return the keys; ``_component_`` is text."""
    structure = structure_of(source)
    return NativeConfig(
        format=FORMAT,
        framework="torchtune",
        fields=fields_of(structure, source),
        unresolved=structure.notes,
        nested=structure.data,
    )
