"""NeMo-RL: one YAML with a ``policy`` that trains through DTensor (FSDP2) or Megatron."""

from __future__ import annotations

import re

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import structure_of
from fsdp_doctor.config.loaders.target_fields import environment_of, target_fields
from fsdp_doctor.model.config import NativeConfig

FORMAT = "nemo_rl"
_POLICY = re.compile(r"^policy:", re.MULTILINE)
_BLOCK = re.compile(r"^\s+(?:dtensor_cfg|megatron_cfg):", re.MULTILINE)


def detect(source: Source) -> int:
    """A ``policy`` with ``dtensor_cfg`` or ``megatron_cfg``."""
    if not _POLICY.search(source.text):
        return 0
    return 95 if _BLOCK.search(source.text) else 0


def load(source: Source) -> NativeConfig:
    """Read the keys as they stand, references filled in."""
    structure = structure_of(source)
    fields, notes = target_fields(structure, source)
    policy = structure.data.get("policy")
    environment: dict[str, str] = {}
    if isinstance(policy, dict):
        for block in ("dtensor_cfg", "megatron_cfg"):
            section = policy.get(block)
            if isinstance(section, dict) and section.get("enabled") is True:
                environment |= environment_of(section.get("env_vars"))
    return NativeConfig(
        format=FORMAT,
        framework="nemo-rl",
        fields=fields,
        unresolved=(*structure.notes, *notes),
        environment=environment,
        nested=structure.data,
    )
