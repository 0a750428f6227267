"""Profile specs, this tool's own YAML (see ``model.spec``)."""

from __future__ import annotations

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of
from fsdp_doctor.model.config import NativeConfig

FORMAT = "spec"
_TOP = frozenset({"name", "world_size", "workload", "config", "steps", "checkpoint"})
_STRATEGIES = frozenset({"ddp", "fsdp1", "fsdp2", "megatron", "megatron_fsdp"})
_CONFIG = frozenset(
    {
        "ddp",
        "fsdp1",
        "fsdp2",
        "megatron",
        "megatron_fsdp",
        "gradient_accumulation",
        "activation_checkpointing",
        "precision",
        "optimizer",
        "compile",
    }
)


def detect(source: Source) -> int:
    """A ``config`` with a strategy of ours, or top-level keys that are all a spec's."""
    data = mapping_of(source)
    config = data.get("config")
    if isinstance(config, dict):
        if config.get("strategy") in _STRATEGIES and not set(config) - _CONFIG - {"strategy"}:
            return 100
        if {"strategy"} | _CONFIG & set(config) != {"strategy"} or "strategy" in config:
            return 70
    if data and set(data) <= _TOP:
        return 60
    return 45 if {"config", "world_size"} <= set(data) or "workload" in data else 0


def load(source: Source) -> NativeConfig:
    """Return the keys as written; they are checked when the spec is resolved."""
    structure = structure_of(source)
    return NativeConfig(
        format=FORMAT,
        framework="torch",
        fields=fields_of(structure, source),
        unresolved=structure.notes,
        nested=structure.data,
    )
