"""What a field of a pair is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Field = tuple[str, Any, Any]
"""Key of the spec, its value in the base, and its other value; ``mesh`` stands for two replicas."""

COMPANIONS: Mapping[tuple[str, Any], Mapping[str, Any]] = {
    ("config.fsdp1.sharding_strategy", "HYBRID_SHARD"): {"config.fsdp1.mesh": "mesh"},
    ("config.fsdp1.sharding_strategy", "_HYBRID_SHARD_ZERO2"): {"config.fsdp1.mesh": "mesh"},
    ("config.precision.grad_scaler", True): {"config.precision.autocast": "float16"},
    ("config.megatron.model.recompute_granularity", "full"): {
        "config.megatron.model.recompute_method": "uniform",
        "config.megatron.model.recompute_num_layers": 1,
    },
    ("config.megatron.model.recompute_modules", None): {
        "config.megatron.model.recompute_granularity": "selective"
    },
    ("config.megatron.ddp.outer_dp_sharding_strategy", "optim"): {
        "config.megatron.ddp.num_distributed_optimizer_instances": 2
    },
    ("config.megatron.optimizer.optimizer_cpu_offload", True): {
        "config.megatron.optimizer.optimizer_offload_fraction": 1.0
    },
}
"""A field's other value (None: any that is neither text nor a switch) -> what it needs beside it;
they are one culprit."""

MOVING = frozenset(
    {
        *(f"workload.{name}" for name in ("micro_batch", "sequence_length")),
        *(f"workload.model.{name}" for name in ("layers", "hidden", "ffn", "vocab")),
        "workload.model.tied_embeddings",
        "config.activation_checkpointing.mode",
        "config.optimizer.name",
        "config.precision.parameters",
        "config.fsdp1.sharding_strategy",
        "config.fsdp1.wrap",
        "config.fsdp2.mesh",
        "config.fsdp2.mp_policy.param_dtype",
        "config.fsdp2.wrap",
        "config.megatron.ddp.data_parallel_sharding_strategy",
        "config.megatron.ddp.fsdp_double_buffer",
        "config.megatron.ddp.grad_reduce_in_fp32",
        "config.megatron.ddp.megatron_fsdp_main_grads_dtype",
        "config.megatron.ddp.use_distributed_optimizer",
        "config.megatron.model.gated_linear_unit",
        "config.megatron.model.recompute_granularity",
        "config.megatron.optimizer.optimizer",
    }
)
"""Keys that mostly move memory: most pairs have one of them, so that few are drawn in vain."""
