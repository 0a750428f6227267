"""OLMo's YAML."""

from __future__ import annotations

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.interpolation import interpolate
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of, word_set
from fsdp_doctor.model.config import NativeConfig

FORMAT = "olmo"
_SIGNS = word_set(
    """fsdp ddp activation_checkpointing device_train_microbatch_size save_interval_unsharded
    sharded_checkpointer save_overwrite evaluators distributed_strategy"""
)


def detect(source: Source) -> int:
    """OLMo's model keys with its checkpoint or FSDP keys."""
    data = mapping_of(source)
    model = data.get("model")
    if not isinstance(model, dict) or "d_model" not in model or "train_loader" in data:
        return 0
    found = len(_SIGNS & set(data))
    return 96 if found >= 3 else 55 if found >= 2 else 0


def load(source: Source) -> NativeConfig:
    """Return the keys, ``${...}`` of the file itself filled in."""
    structure = structure_of(source)
    fields, unresolved = interpolate(fields_of(structure, source))
    return NativeConfig(
        format=FORMAT,
        framework="olmo",
        fields=fields,
        unresolved=(*structure.notes, *unresolved),
        nested=structure.data,
    )
