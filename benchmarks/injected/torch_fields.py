"""Culprits and decoys of torch's strategies."""

from __future__ import annotations

from injected.field import Field

STRATEGIES = ("fsdp2", "fsdp1", "ddp")

_ANY: list[Field] = [
    *[("config.activation_checkpointing.mode", "none", m) for m in ("full", "every_n")],
    ("config.activation_checkpointing.mode", "none", "selective"),
    ("config.optimizer.name", "adamw", "sgd"),
    ("config.optimizer.momentum", 0.0, 0.9),
    *[("config.optimizer.implementation", "default", i) for i in ("foreach", "fused", "for_loop")],
    ("config.optimizer.max_grad_norm", None, 1.0),
    ("config.precision.autocast", None, "bfloat16"),
    ("config.precision.parameters", "float32", "bfloat16"),
    ("config.gradient_accumulation.steps", 1, 2),
    ("config.gradient_accumulation.sync", "every_microbatch", "last_microbatch"),
]
CULPRITS: dict[str, list[Field]] = {
    "ddp": [
        *_ANY,
        *[("config.ddp.bucket_cap_mb", None, size) for size in (1, 100)],
        ("config.ddp.gradient_as_bucket_view", False, True),
        ("config.ddp.static_graph", False, True),
        ("config.ddp.find_unused_parameters", False, True),
        *[("config.ddp.comm_hook", "none", h) for h in ("bf16_compress", "fp16_compress")],
    ],
    "fsdp1": [
        *_ANY,
        *[
            ("config.fsdp1.sharding_strategy", "FULL_SHARD", strategy)
            for strategy in ("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
        ],
        ("config.fsdp1.mixed_precision.param_dtype", None, "bfloat16"),
        ("config.fsdp1.mixed_precision.reduce_dtype", None, "bfloat16"),
        ("config.fsdp1.mixed_precision.buffer_dtype", None, "bfloat16"),
        *[("config.fsdp1.backward_prefetch", "BACKWARD_PRE", p) for p in ("BACKWARD_POST", None)],
        ("config.fsdp1.forward_prefetch", False, True),
        ("config.fsdp1.limit_all_gathers", True, False),
        ("config.fsdp1.use_orig_params", False, True),
        ("config.fsdp1.wrap", "block", "none"),
    ],
    "fsdp2": [
        *_ANY,
        *[("config.fsdp2.reshard_after_forward", None, value) for value in (True, False, 2)],
        ("config.fsdp2.mp_policy.param_dtype", None, "bfloat16"),
        ("config.fsdp2.mp_policy.reduce_dtype", None, "bfloat16"),
        ("config.fsdp2.mp_policy.output_dtype", None, "float32"),
        ("config.fsdp2.mp_policy.cast_forward_inputs", True, False),
        ("config.fsdp2.mesh", None, "mesh"),
        ("config.fsdp2.wrap", "block", "none"),
        ("config.fsdp2.blocks_per_unit", 1, 2),
    ],
}
ON_CUDA: dict[str, list[Field]] = {
    "ddp": [("config.precision.grad_scaler", False, True)],
    "fsdp1": [
        ("config.precision.grad_scaler", False, True),
        ("config.fsdp1.cpu_offload.offload_params", False, True),
    ],
    "fsdp2": [("config.fsdp2.offload_policy", None, {"pin_memory": False})],
}
"""What needs a GPU."""

_DECOYS: list[Field] = [
    ("workload.seed", 0, 7),
    ("steps.timed", 1, 2),
    ("steps.warmup", 3, 4),
    ("checkpoint", None, "torch_dcp"),
    ("config.optimizer.learning_rate", 1e-4, 3e-4),
    ("config.optimizer.weight_decay", 0.01, 0.1),
    ("config.optimizer.momentum", 0.0, 0.9),
    ("config.activation_checkpointing.every_n", 2, 4),
    ("config.gradient_accumulation.sync", "every_microbatch", "last_microbatch"),
    ("config.megatron.model.recompute_granularity", None, "full"),
    ("config.megatron.optimizer.lr", 1e-4, 3e-4),
]
_DDP: list[Field] = [
    ("config.ddp.bucket_cap_mb", None, 200),
    ("config.ddp.comm_hook", "none", "bf16_compress"),
]
_FSDP1: list[Field] = [
    ("config.fsdp1.sharding_strategy", "FULL_SHARD", "NO_SHARD"),
    ("config.fsdp1.use_orig_params", False, True),
]
_FSDP2: list[Field] = [
    ("config.fsdp2.reshard_after_forward", None, False),
    ("config.fsdp2.mp_policy.param_dtype", None, "bfloat16"),
]
DECOYS: dict[str, list[Field]] = {
    "ddp": [
        *_DECOYS,
        *_FSDP1,
        *_FSDP2,
        ("config.ddp.find_unused_parameters", False, True),
    ],
    "fsdp1": [
        *_DECOYS,
        *_DDP,
        *_FSDP2,
        ("config.fsdp1.forward_prefetch", False, True),
        ("config.fsdp1.limit_all_gathers", True, False),
    ],
    "fsdp2": [*_DECOYS, *_DDP, *_FSDP1],
}
