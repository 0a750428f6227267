"""Fields of a YAML with ``_target_`` objects and ``${...}`` references, for NeMo's loaders."""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.interpolation import interpolate
from fsdp_doctor.config.loaders.structure import Structure
from fsdp_doctor.config.loaders.targets import flatten_targets
from fsdp_doctor.model.config import NativeField
from fsdp_doctor.redact import redact


def target_fields(
    structure: Structure, source: Source
) -> tuple[dict[str, NativeField], tuple[str, ...]]:
    """Return the leaves with their lines, references filled in, and notes on what was not."""
    fields = {
        path: NativeField(
            value=redact(value, path.rpartition(".")[2]) if isinstance(value, str) else value,
            file=source.name,
            line=structure.lines.get(path),
        )
        for path, value in flatten_targets(structure.data).items()
    }
    return interpolate(fields)


def environment_of(section: Any) -> dict[str, str]:
    """Return a section of environment variables as text."""
    if not isinstance(section, dict):
        return {}
    return {str(name): str(value) for name, value in section.items() if value is not None}
