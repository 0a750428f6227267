"""Any YAML, JSON or TOML mapping whose framework is not known: keys and values as they stand."""

from __future__ import annotations

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of
from fsdp_doctor.model.config import NativeConfig

FORMAT = "generic"


def detect(source: Source) -> int:
    """Any mapping will do, when nobody else wants it."""
    return 1 if mapping_of(source) else 0


def load(source: Source) -> NativeConfig:
    """Return the keys as written."""
    structure = structure_of(source)
    return NativeConfig(
        format=FORMAT,
        framework="unknown",
        fields=fields_of(structure, source),
        unresolved=structure.notes,
        nested=structure.data,
    )
