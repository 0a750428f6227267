"""DeepSpeed's JSON, templates with comments and ``_description`` keys included."""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of, word_set
from fsdp_doctor.model.config import NativeConfig

FORMAT = "deepspeed"
_TOP = word_set(
    """activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint communication_data_type
    compression_training comms_logger csv_monitor curriculum_learning data_efficiency data_types
    dataloader_drop_last disable_allgather dump_state elasticity eigenvalue flops_profiler fp16
    fp32_allreduce gradient_accumulation_steps gradient_clipping gradient_predivide_factor
    graph_harvesting hybrid_engine load_universal_checkpoint memory_breakdown monitor_config
    nebula optimizer pipeline prescale_gradients progressive_layer_drop quantize_training
    scheduler seq_parallel_communication_data_type sequence_parallel_size sparse_attention
    sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast
    train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism
    wall_clock_breakdown wandb zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    zero_optimization compile zenflow vocabulary_size weight_quantization
    gradient_accumulation_dtype comet"""
)
_CERTAIN = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu"})
_OTHERS = frozenset({"pipe_parallel_size", "num_layers", "per_device_train_batch_size"})


def detect(source: Source) -> int:
    """ZeRO or DeepSpeed's batch keys at the top, and nothing of a framework around it."""
    data = {key.replace("-", "_") for key in mapping_of(source)}
    named = {key for key in data if not key.startswith("_")}
    if not named or named & _OTHERS:
        return 0
    if named <= _TOP and (named & _CERTAIN or len(named) > 2):
        return 95
    return 55 if "zero_optimization" in named and len(named & _TOP) * 2 > len(named) else 0


def load(source: Source) -> NativeConfig:
    """Return DeepSpeed's keys; a launcher's name for JSON's text ``auto`` is kept."""
    structure = structure_of(source)
    data: dict[str, Any] = structure.data
    fields = fields_of(structure, source)
    return NativeConfig(
        format=FORMAT,
        framework="deepspeed",
        fields=fields,
        unknown=tuple(k for k in data if k not in _TOP and not k.startswith("_")),
        unresolved=structure.notes,
        nested=data,
    )
