"""W&B's ``files/config.yaml``: ``{value: ...}`` around each key of some other format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import mapping_of, source_of, structure_of
from fsdp_doctor.model.config import NativeConfig

FORMAT = "wandb"


def detect(source: Source) -> int:
    """Nearly all values are mappings with ``value``."""
    data = mapping_of(source)
    wrapped = sum(isinstance(v, dict) and "value" in v for v in data.values())
    if "_wandb" in data and wrapped:
        return 100
    return 99 if len(data) >= 2 and wrapped >= 2 and wrapped * 10 >= len(data) * 9 else 0


def load(source: Source) -> NativeConfig:
    """Unwrap, and read what is inside by its own format."""
    from fsdp_doctor.config.loaders import detect as detect_format

    structure = structure_of(source)
    data = {
        key: value["value"] if isinstance(value, dict) and "value" in value else value
        for key, value in structure.data.items()
        if key not in ("_wandb", "wandb_version")
    }
    inner = source_of(data, source, structure.notes)
    loader = detect_format(inner, without=("wandb", "env_file"))
    found = loader.load(inner)
    packages = {**_packages(structure.data), **found.packages}
    return replace(found, format=FORMAT, packages=packages)


def _packages(data: dict[str, Any]) -> dict[str, str]:
    """Return versions of packages that W&B noted, e.g. in ``_wandb.value.framework_version``."""
    found: dict[str, str] = {}
    for key in ("transformers_version", "torch_version", "accelerate_version", "deepspeed_version"):
        value = data.get(key)
        value = value.get("value") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[key.removesuffix("_version")] = value
    return found
