"""Composer and llm-foundry YAML."""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.interpolation import interpolate
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of, word_set
from fsdp_doctor.model.config import NativeConfig

FORMAT = "composer"
_FSDP = word_set(
    """activation_checkpointing activation_checkpointing_reentrant activation_cpu_offload
    te_checkpoint_wrapper te_shard_fp8_weight auto_wrap backward_prefetch cpu_offload
    data_parallel_shard_degree data_parallel_replicate_degree device_mesh flatten_parameters
    forward_prefetch ignored_modules keep_low_precision_grads limit_all_gathers
    load_monolith_rank0_only
    load_planner mixed_precision process_group save_planner sharded_ckpt_prefix_dir
    sharding_strategy
    state_dict_type sync_module_states use_orig_params verbose version fsdp_version"""
)
_TOP = word_set(
    """train_loader device_train_microbatch_size global_train_batch_size max_duration
    eval_interval algorithms"""
)


def detect(source: Source) -> int:
    """llm-foundry's loaders and batch keys."""
    data = mapping_of(source)
    if "train_loader" in data and "device_train_microbatch_size" in data:
        return 98
    if "train_loader" in data and ("fsdp_config" in data or "max_duration" in data):
        return 90
    found = _TOP & set(data)
    if {"fsdp", "evaluators"} & set(data):
        return 0
    return 60 if len(found) >= 3 else 45 if "parallelism_config" in data and found else 0


def load(source: Source) -> NativeConfig:
    """Return the keys with ``${...}`` of the file itself filled in."""
    structure = structure_of(source)
    fields, unresolved = interpolate(fields_of(structure, source))
    return NativeConfig(
        format=FORMAT,
        framework="composer",
        fields=fields,
        unknown=_unknown(structure.data),
        unresolved=(*structure.notes, *unresolved),
        nested=structure.data,
    )


def _unknown(data: dict[str, Any]) -> tuple[str, ...]:
    found = []
    parallel = data.get("parallelism_config")
    blocks = [("fsdp_config.", data.get("fsdp_config"))]
    if isinstance(parallel, dict):
        blocks.append(("parallelism_config.fsdp.", parallel.get("fsdp")))
    for prefix, block in blocks:
        if isinstance(block, dict):
            found += [f"{prefix}{key}" for key in block if key not in _FSDP]
    return tuple(found)
