"""verl's Hydra configs: a whole trainer, or the FSDP engine's part alone."""

from __future__ import annotations

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.interpolation import interpolate
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of
from fsdp_doctor.model.config import NativeConfig

FORMAT = "verl"
_ENGINE = frozenset({"param_offload", "optimizer_offload", "fsdp_size", "offload_policy"})


def detect(source: Source) -> int:
    """``actor_rollout_ref``, verl's classes, or the engine's own keys."""
    data = mapping_of(source)
    if "actor_rollout_ref" in data:
        return 98
    if str(data.get("_target_", "")).startswith("verl."):
        return 98
    if len(_ENGINE & set(data)) >= 2:
        return 80
    if "verl." in source.text and any(
        isinstance(v, dict) and _ENGINE & set(v) for v in data.values()
    ):
        return 90
    actor = data.get("actor")
    nested = actor if isinstance(actor, dict) else data
    block = nested.get("fsdp_config")
    return 80 if isinstance(block, dict) and len(_ENGINE & set(block)) >= 2 else 0


def load(source: Source) -> NativeConfig:
    """Return the keys, ``${...}`` of the file itself filled in; ``_target_`` is text."""
    structure = structure_of(source)
    fields, unresolved = interpolate(fields_of(structure, source))
    return NativeConfig(
        format=FORMAT,
        framework="verl",
        fields=fields,
        unresolved=(*structure.notes, *unresolved),
        nested=structure.data,
    )
