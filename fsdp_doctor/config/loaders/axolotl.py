"""axolotl's YAML."""

from __future__ import annotations

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of, word_set
from fsdp_doctor.model.config import NativeConfig

FORMAT = "axolotl"
FSDP = word_set(
    """fsdp_version version activation_checkpointing offload_params sync_module_states
    cpu_ram_efficient_loading cpu_offload_pin_memory use_orig_params state_dict_type
    final_state_dict_type auto_wrap_policy transformer_layer_cls_to_wrap min_num_params
    reshard_after_forward mixed_precision_policy"""
)
"""Keys of ``fsdp_config`` that axolotl's schema has; others are dropped in silence."""


def detect(source: Source) -> int:
    """``base_model`` with axolotl's batch keys."""
    data = mapping_of(source)
    if "base_model" not in data:
        return 0
    named = {"micro_batch_size", "sequence_len", "sample_packing", "datasets", "adapter"}
    found = len(named & set(data))
    return 98 if found >= 2 else 60 if found else 30


def load(source: Source) -> NativeConfig:
    """Return the keys; those of ``fsdp_config`` that the schema lacks are in ``unknown``."""
    structure = structure_of(source)
    block = structure.data.get("fsdp_config")
    unknown: tuple[str, ...] = ()
    if isinstance(block, dict):
        unknown = tuple(
            f"fsdp_config.{key}" for key in block if key.removeprefix("fsdp_") not in FSDP
        )
    return NativeConfig(
        format=FORMAT,
        framework="axolotl",
        fields=fields_of(structure, source),
        unknown=unknown,
        unresolved=structure.notes,
        nested=structure.data,
    )
