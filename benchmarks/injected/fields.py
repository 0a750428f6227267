"""Of which fields the pairs are made: bases, culprits and decoys of every strategy.

A Megatron base differs from another in Megatron's own switches, so each is a strategy here.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

Field = tuple[str, Any, Any]
"""Key of the spec, its value in the base, and its other value."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is trained by a base; culprits make it larger."""

    layers: int
    more_layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    micro_batch: int
    sequence_length: int

    def workload(self) -> dict[str, Any]:
        """Return the section of a spec."""
        names = ("layers", "hidden", "heads", "ffn", "vocab")
        return {
            "model": {name: getattr(self, name) for name in names},
            "micro_batch": self.micro_batch,
            "sequence_length": self.sequence_length,
        }

    def culprits(self) -> list[Field]:
        """Return the fields of the workload that move memory under any strategy."""
        return [
            ("workload.micro_batch", self.micro_batch, 2 * self.micro_batch),
            ("workload.sequence_length", self.sequence_length, 2 * self.sequence_length),
            ("workload.model.layers", self.layers, self.more_layers),
            ("workload.model.ffn", self.ffn, 2 * self.ffn),
            ("workload.model.vocab", self.vocab, self.vocab * 3 // 2),
        ]


TINY = Shape(
    layers=2,
    more_layers=3,
    hidden=256,
    heads=4,
    ffn=704,
    vocab=4096,
    micro_batch=2,
    sequence_length=128,
)
SMALL = Shape(
    layers=4,
    more_layers=6,
    hidden=1024,
    heads=16,
    ffn=2816,
    vocab=16384,
    micro_batch=2,
    sequence_length=512,
)
SHAPES = {"cpu": TINY, "cuda": SMALL}
"""Device -> what is trained on it: a GPU needs more than a few of its segments."""

STEPS: dict[str, Any] = {"warmup": 3, "timed": 1, "kernel_profile": False}
TORCH = ("fsdp2", "fsdp1", "ddp")
MEGATRON = ("megatron-fsdp", "megatron-distopt", "megatron-ddp", "megatron-fsdp-units")
STRATEGIES = (*TORCH, *MEGATRON)

_MODEL = {"bf16": True, "normalization": "RMSNorm", "add_bias_linear": False}
_SHARDED: dict[str, Any] = {
    "data_parallel_sharding_strategy": "optim_grads_params",
    "megatron_fsdp_main_grads_dtype": "float32",
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
_MEGATRON_BASES: dict[str, dict[str, Any]] = {
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

_TORCH_CULPRITS: list[Field] = [
    ("config.activation_checkpointing.mode", "none", "full"),
    ("config.optimizer.name", "adamw", "sgd"),
    ("config.precision.autocast", None, "bfloat16"),
]
_MEGATRON_CULPRITS: list[Field] = [
    ("config.megatron.model.recompute_granularity", None, "selective"),
    ("config.megatron.model.gated_linear_unit", False, True),
]
_FSDP_CULPRITS: list[Field] = [
    *_MEGATRON_CULPRITS,
    ("config.megatron.ddp.data_parallel_sharding_strategy", "optim_grads_params", "optim"),
    ("config.megatron.ddp.megatron_fsdp_main_grads_dtype", "float32", "bfloat16"),
    ("config.megatron.ddp.fsdp_double_buffer", False, True),
]
_CULPRITS: dict[str, list[Field]] = {
    "ddp": [
        *_TORCH_CULPRITS,
        ("config.ddp.gradient_as_bucket_view", False, True),
        ("config.precision.parameters", "float32", "bfloat16"),
    ],
    "fsdp1": [
        *_TORCH_CULPRITS,
        ("config.fsdp1.sharding_strategy", "FULL_SHARD", "SHARD_GRAD_OP"),
        ("config.fsdp1.mixed_precision.param_dtype", None, "bfloat16"),
        ("config.fsdp1.wrap", "block", "none"),
    ],
    "fsdp2": [
        *_TORCH_CULPRITS,
        ("config.fsdp2.reshard_after_forward", True, False),
        ("config.fsdp2.mp_policy.param_dtype", None, "bfloat16"),
        ("config.fsdp2.wrap", "block", "none"),
        ("config.precision.parameters", "float32", "bfloat16"),
    ],
    "megatron-ddp": [
        *_MEGATRON_CULPRITS,
        ("config.megatron.ddp.grad_reduce_in_fp32", True, False),
        ("config.megatron.ddp.use_distributed_optimizer", False, True),
        ("config.megatron.optimizer.optimizer", "adam", "sgd"),
    ],
    "megatron-distopt": [
        *_MEGATRON_CULPRITS,
        ("config.megatron.ddp.grad_reduce_in_fp32", True, False),
        ("config.megatron.ddp.use_distributed_optimizer", True, False),
        ("config.megatron.ddp.num_distributed_optimizer_instances", 1, 2),
    ],
    "megatron-fsdp": [
        *_FSDP_CULPRITS,
        ("config.megatron.ddp.suggested_communication_unit_size", None, 20_000_000),
    ],
    "megatron-fsdp-units": [
        *_FSDP_CULPRITS,
        ("config.megatron.ddp.suggested_communication_unit_size", 20_000_000, 40_000_000),
    ],
}

_ANY_DECOYS: list[Field] = [("workload.seed", 0, 7), ("steps.timed", 1, 2)]
_TORCH_DECOYS: list[Field] = [
    _ANY_DECOYS[0],
    ("config.optimizer.learning_rate", 1e-4, 3e-4),
    ("config.optimizer.weight_decay", 0.01, 0.1),
    ("config.activation_checkpointing.every_n", 2, 4),
    ("config.gradient_accumulation.sync", "every_microbatch", "last_microbatch"),
    _ANY_DECOYS[1],
]
_MEGATRON_DECOYS: list[Field] = [
    *_ANY_DECOYS,
    ("config.megatron.optimizer.lr", 1e-4, 3e-4),
    ("config.megatron.optimizer.weight_decay", 0.01, 0.1),
    ("config.megatron.optimizer.clip_grad", 1.0, 0.5),
    ("config.megatron.optimizer.pin_cpu_grads", True, False),
    ("config.megatron.checkpoint.fully_parallel_save", True, False),
    ("config.ddp.bucket_cap_mb", None, 200),
    ("config.fsdp2.reshard_after_forward", None, False),
    ("config.optimizer.name", "adamw", "sgd"),
    ("config.activation_checkpointing.every_n", 2, 4),
]
_UNREAD_BY_DDP: list[Field] = [
    ("config.megatron.ddp.data_parallel_sharding_strategy", "no_shard", "optim_grads"),
    ("config.megatron.ddp.fsdp_double_buffer", False, True),
    ("config.megatron.ddp.suggested_communication_unit_size", None, 20_000_000),
    ("config.megatron.ddp.average_in_collective", False, True),
]
_UNREAD_BY_FSDP: list[Field] = [
    ("config.megatron.ddp.grad_reduce_in_fp32", False, True),
    ("config.megatron.ddp.align_param_gather", False, True),
]
_DECOYS: dict[str, list[Field]] = {
    "ddp": [
        *_TORCH_DECOYS,
        ("config.fsdp2.reshard_after_forward", None, False),
        ("config.fsdp1.sharding_strategy", None, "NO_SHARD"),
        ("config.ddp.find_unused_parameters", False, True),
    ],
    "fsdp1": [
        *_TORCH_DECOYS,
        ("config.ddp.bucket_cap_mb", None, 200),
        ("config.fsdp2.reshard_after_forward", None, False),
        ("config.fsdp1.forward_prefetch", False, True),
        ("config.fsdp1.limit_all_gathers", True, False),
    ],
    "fsdp2": [
        *_TORCH_DECOYS,
        ("config.ddp.bucket_cap_mb", None, 200),
        ("config.fsdp1.sharding_strategy", None, "NO_SHARD"),
        ("config.fsdp1.use_orig_params", None, True),
        ("config.optimizer.momentum", 0.0, 0.9),
    ],
    "megatron-ddp": [
        *_MEGATRON_DECOYS,
        *_UNREAD_BY_DDP,
        ("config.megatron.ddp.overlap_grad_reduce", True, False),
    ],
    "megatron-distopt": [*_MEGATRON_DECOYS, *_UNREAD_BY_DDP],
    "megatron-fsdp": [*_MEGATRON_DECOYS, *_UNREAD_BY_FSDP],
    "megatron-fsdp-units": [*_MEGATRON_DECOYS, *_UNREAD_BY_FSDP],
}


def base(strategy: str, device: str, ranks: int) -> dict[str, Any]:
    """Return the spec that both sides of a pair start from."""
    raw: dict[str, Any] = {
        "world_size": ranks,
        "workload": SHAPES[device].workload(),
        "steps": dict(STEPS),
        "config": {"strategy": strategy},
    }
    if strategy in _MEGATRON_BASES:
        own = copy.deepcopy(_MEGATRON_BASES[strategy])
        raw["config"] = {
            "strategy": "megatron",
            "gradient_accumulation": {"steps": 2},
            "megatron": {**own, "model": dict(_MODEL), "optimizer": {"lr": 1e-4}},
        }
    return raw


def culprits(strategy: str, device: str) -> list[Field]:
    """Return the fields that may be to blame."""
    return [*SHAPES[device].culprits(), *_CULPRITS[strategy]]


def decoys(strategy: str) -> list[Field]:
    """Return the fields that leave memory alone."""
    return _DECOYS[strategy]


def put(raw: dict[str, Any], path: str, value: Any) -> None:
    """Write a value into a spec by its dotted key."""
    *parents, last = path.split(".")
    section = raw
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = value
