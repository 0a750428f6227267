"""prime-rl's TOML (trainer and SFT)."""

from __future__ import annotations

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of, word_set
from fsdp_doctor.model.config import NativeConfig

FORMAT = "prime_rl"
_TOP = word_set(
    """max_steps ckpt resume model optim data log wandb scheduler loss trainer orchestrator
    inference weights output_dir profiling val seq_len batch_size deployment slurm clean_output_dir
    max_async_level dp_replicate matmul_precision bench dist_timeout_seconds memory_profiler_path
    gc heartbeat env run_config tokenizer trace_path async_barrier rollout_transport"""
)
_MODEL = word_set(
    """fsdp_cpu_offload optim_cpu_offload full_offload ac ac_offloading dp_replicate
    optimization_dtype reduce_dtype reshard_after_forward impl attn fused_lm_head_chunk_size
    fused_lm_head_token_chunk_size compile cp ep lora moe_use_grouped_mm"""
)


def detect(source: Source) -> int:
    """TOML whose tables are prime-rl's, with a ``[model]`` that names one."""
    data = mapping_of(source)
    if not data or structure_of(source).syntax != "toml" or "training" in data:
        return 0
    if set(data) - _TOP:
        return 0
    model = data.get("model")
    named = isinstance(model, dict) and (_MODEL & set(model) or "name" in model)
    nested = {"trainer", "orchestrator"} & set(data)
    return 90 if named and ("max_steps" in data or "data" in data or nested) else 45


def load(source: Source) -> NativeConfig:
    """Return the keys as written."""
    structure = structure_of(source)
    return NativeConfig(
        format=FORMAT,
        framework="prime-rl",
        fields=fields_of(structure, source),
        unresolved=structure.notes,
        nested=structure.data,
    )
