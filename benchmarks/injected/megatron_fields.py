"""Bases, culprits and decoys of Megatron's engines."""

from __future__ import annotations

from typing import Any

from injected.field import Field

STRATEGIES = ("megatron-fsdp", "megatron-distopt", "megatron-ddp", "megatron-fsdp-units")

_MODEL = {"bf16": True, "normalization": "RMSNorm", "add_bias_linear": False}
_SHARDED: dict[str, Any] = {
    "data_parallel_sharding_strategy": "optim_grads_params",
    "megatron_fsdp_main_grads_dtype": "float32",
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
_ENGINES: dict[str, dict[str, Any]] = {
    "megatron-ddp": {"ddp": {"grad_reduce_in_fp32": True, "overlap_grad_reduce": True}},
    "megatron-distopt": {
        "ddp": {
            "use_distributed_optimizer": True,
            "grad_reduce_in_fp32": True,
            "overlap_grad_reduce": True,
        },
    },
    "megatron-fsdp": {"dist": {"use_megatron_fsdp": True}, "ddp": _SHARDED},
    "megatron-fsdp-units": {
        "dist": {"use_megatron_fsdp": True},
        "ddp": {**_SHARDED, "suggested_communication_unit_size": 20_000_000},
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: {
        "strategy": "megatron",
        "gradient_accumulation": {"steps": 2},
        "megatron": {**engine, "model": _MODEL, "optimizer": {"lr": 1e-4}},
    }
    for name, engine in _ENGINES.items()
}
"""Strategy -> the config that both sides of a pair start from. Recorded pairs rest on it."""

_ANY: list[Field] = [
    *[("config.megatron.model.recompute_granularity", None, g) for g in ("selective", "full")],
    ("config.megatron.model.recompute_modules", None, ["mlp"]),
    ("config.megatron.model.gated_linear_unit", False, True),
    ("config.megatron.model.add_bias_linear", False, True),
    ("config.megatron.model.normalization", "RMSNorm", "LayerNorm"),
    ("config.megatron.model.attention_softmax_in_fp32", True, False),
    ("config.megatron.model.cross_entropy_loss_fusion", False, True),
    ("config.megatron.optimizer.optimizer", "adam", "sgd"),
    ("config.megatron.optimizer.clip_grad", 1.0, 0.0),
    *[("config.gradient_accumulation.steps", 2, steps) for steps in (1, 4)],
]
_WITH_DDP: list[Field] = [
    *_ANY,
    ("config.megatron.ddp.grad_reduce_in_fp32", True, False),
    ("config.megatron.ddp.overlap_grad_reduce", True, False),
    ("config.megatron.ddp.bucket_size", None, 4_000_000),
    ("config.megatron.ddp.check_for_nan_in_grad", False, True),
    ("config.megatron.ddp.average_in_collective", False, True),
]
_WITH_FSDP: list[Field] = [
    *_ANY,
    *[
        ("config.megatron.ddp.data_parallel_sharding_strategy", "optim_grads_params", strategy)
        for strategy in ("optim_grads", "optim", "no_shard")
    ],
    ("config.megatron.ddp.megatron_fsdp_main_grads_dtype", "float32", "bfloat16"),
    ("config.megatron.ddp.megatron_fsdp_main_params_dtype", "float32", "bfloat16"),
    ("config.megatron.ddp.megatron_fsdp_grad_comm_dtype", None, "bfloat16"),
    ("config.megatron.ddp.fsdp_double_buffer", False, True),
    ("config.megatron.ddp.overlap_param_gather", True, False),
    ("config.megatron.ddp.overlap_grad_reduce", True, False),
    ("config.megatron.ddp.bucket_size", None, 4_000_000),
    ("config.megatron.ddp.outer_dp_sharding_strategy", "no_shard", "optim"),
    ("config.megatron.ddp.num_distributed_optimizer_instances", 1, 2),
    ("config.megatron.ddp.gradient_reduce_div_fusion", True, False),
    ("config.megatron.model.init_model_with_meta_device", False, True),
]
CULPRITS: dict[str, list[Field]] = {
    "megatron-ddp": [
        *_WITH_DDP,
        ("config.megatron.ddp.use_distributed_optimizer", False, True),
    ],
    "megatron-distopt": [
        *_WITH_DDP,
        ("config.megatron.ddp.use_distributed_optimizer", True, False),
        ("config.megatron.ddp.num_distributed_optimizer_instances", 1, 2),
        ("config.megatron.ddp.overlap_param_gather", False, True),
        ("config.megatron.ddp.pad_buckets_for_high_nccl_busbw", False, True),
        ("config.megatron.ddp.reduce_scatter_with_fp32_accumulation", False, True),
    ],
    "megatron-fsdp": [
        *_WITH_FSDP,
        ("config.megatron.ddp.suggested_communication_unit_size", None, 20_000_000),
    ],
    "megatron-fsdp-units": [
        *_WITH_FSDP,
        ("config.megatron.ddp.suggested_communication_unit_size", 20_000_000, 40_000_000),
    ],
}

_DECOYS: list[Field] = [
    ("workload.seed", 0, 7),
    ("steps.timed", 1, 2),
    ("config.megatron.optimizer.lr", 1e-4, 3e-4),
    ("config.megatron.optimizer.weight_decay", 0.01, 0.1),
    ("config.megatron.optimizer.clip_grad", 1.0, 0.5),
    ("config.megatron.optimizer.pin_cpu_grads", True, False),
    ("config.megatron.optimizer.pin_cpu_params", True, False),
    ("config.megatron.checkpoint.fully_parallel_save", True, False),
    ("config.megatron.dist.torch_fsdp2_reshard_after_forward", True, False),
    ("config.ddp.bucket_cap_mb", None, 200),
    ("config.fsdp2.reshard_after_forward", None, False),
    ("config.optimizer.name", "adamw", "sgd"),
    ("config.precision.autocast", None, "bfloat16"),
    ("config.activation_checkpointing.mode", "none", "full"),
    ("config.activation_checkpointing.every_n", 2, 4),
]
_UNREAD_BY_DDP: list[Field] = [
    ("config.megatron.ddp.data_parallel_sharding_strategy", "no_shard", "optim_grads"),
    ("config.megatron.ddp.fsdp_double_buffer", False, True),
    ("config.megatron.ddp.suggested_communication_unit_size", None, 20_000_000),
    ("config.megatron.ddp.average_in_collective", False, True),
    ("config.megatron.ddp.megatron_fsdp_main_grads_dtype", None, "bfloat16"),
]
_UNREAD_BY_FSDP: list[Field] = [
    ("config.megatron.ddp.grad_reduce_in_fp32", False, True),
    ("config.megatron.ddp.align_param_gather", False, True),
    ("config.megatron.ddp.pad_buckets_for_high_nccl_busbw", False, True),
]
DECOYS: dict[str, list[Field]] = {
    "megatron-ddp": [
        *_DECOYS,
        *_UNREAD_BY_DDP,
        ("config.megatron.ddp.overlap_grad_reduce", True, False),
    ],
    "megatron-distopt": [*_DECOYS, *_UNREAD_BY_DDP],
    "megatron-fsdp": [*_DECOYS, *_UNREAD_BY_FSDP],
    "megatron-fsdp-units": [*_DECOYS, *_UNREAD_BY_FSDP],
}
