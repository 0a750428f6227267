"""What a field comes to where an engine or framework does not have it at all."""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.resolvers.engines import DEFAULT_BUCKET_BYTES

NEUTRAL: dict[str, Any] = {
    "batch.accumulation": 1,
    "batch.packing": False,
    "comm.allgather_partitions": True,
    "comm.async_tp": False,
    "comm.bucket_bytes": DEFAULT_BUCKET_BYTES,
    "comm.bucket_view": False,
    "comm.contiguous_gradients": True,
    "comm.float8_all_gather": False,
    "comm.hook": "none",
    "comm.limit_all_gathers": True,
    "comm.prefetch_bwd": "pre",
    "comm.prefetch_fwd": False,
    "comm.quantized_gradients": False,
    "comm.quantized_weights": False,
    "comm.reduce_scatter": True,
    "compile.enabled": False,
    "ddp.find_unused_parameters": False,
    "ddp.static_graph": False,
    "fsdp1.keep_low_precision_grads": False,
    "fsdp1.use_orig_params": False,
    "init.sync_module_states": True,
    "kernels.use_kernels": False,
    "offload.activations": "none",
    "offload.grads": "none",
    "offload.idle_optimizer": False,
    "offload.idle_params": False,
    "offload.optimizer": "none",
    "offload.params": "none",
    "offload.pin_memory": True,
    "optimizer.in_backward": False,
    "optimizer.sub_group_size": 1_000_000_000,
    "parallel.cp": 1,
    "parallel.ep": 1,
    "parallel.etp": 1,
    "parallel.pp": 1,
    "parallel.sp": 1,
    "parallel.tp": 1,
    "precision.autocast": "none",
    "precision.cast_inputs": True,
    "precision.fp8": False,
    "recompute.mode": "none",
    "recompute.reentrant": True,
    "sharding.blocks_per_unit": 1,
    "sharding.max_live_parameters": 1_000_000_000,
    "sharding.max_reuse_distance": 1_000_000_000,
    "sharding.replicate_size": 1,
    "sharding.reshard_after_forward": True,
    "sharding.secondary_partition": 1,
    "sharding.shard_degree": -1,
    "sharding.unit": "block",
}
"""Key -> value that not having the field is equal to."""


def is_neutral(key: str, value: Any) -> bool:
    """Return whether a field with ``value`` is as good as no such field."""
    if key not in NEUTRAL:
        return False
    neutral = NEUTRAL[key]
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
