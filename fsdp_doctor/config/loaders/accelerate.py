"""Configs of ``accelerate launch`` (YAML, or JSON as ms-swift has it)."""

from __future__ import annotations

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of, word_set
from fsdp_doctor.model.config import NativeConfig

FORMAT = "accelerate"
_FSDP = word_set(
    """version offload_params min_num_params sharding_strategy reshard_after_forward
    auto_wrap_policy transformer_layer_cls_to_wrap backward_prefetch state_dict_type
    forward_prefetch use_orig_params cpu_ram_efficient_loading sync_module_states
    activation_checkpointing activation_checkpointing_offload ignored_modules"""
)
"""Arguments ``--fsdp_*`` of ``accelerate launch`` 1.15; other keys of the block are dropped."""
_TOP = word_set(
    """compute_environment debug distributed_type downcast_bf16 enable_cpu_affinity fsdp_config
    deepspeed_config megatron_lm_config parallelism_config fp8_config dynamo_config ipex_config
    mpirun_config main_process_ip main_process_port machine_rank main_training_function
    mixed_precision num_machines num_processes rdzv_backend same_network tpu_env tpu_name tpu_zone
    tpu_use_cluster tpu_use_sudo use_cpu gpu_ids command_file commands command env fp16
    dynamo_backend main_process_log_dir"""
)


def detect(source: Source) -> int:
    """``distributed_type`` at the top; older ones have ``compute_environment`` with it."""
    data = mapping_of(source)
    if "distributed_type" not in data:
        return 0
    return 100 if {"compute_environment", "num_processes"} & set(data) else 90


def load(source: Source) -> NativeConfig:
    """Return the keys; those that the launcher does not know are in ``unknown``."""
    structure = structure_of(source)
    data = structure.data
    unknown = [key for key in data if key not in _TOP and not key.startswith("_")]
    fsdp = data.get("fsdp_config")
    if isinstance(fsdp, dict):
        unknown += [f"fsdp_config.{key}" for key in fsdp if key.removeprefix("fsdp_") not in _FSDP]
    return NativeConfig(
        format=FORMAT,
        framework="accelerate",
        fields=fields_of(structure, source),
        unknown=tuple(unknown),
        unresolved=structure.notes,
        nested=data,
    )
