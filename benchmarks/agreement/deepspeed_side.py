"""DeepSpeed: its own config objects."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

from agreement.base import Case

_ZERO: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "no stage": {},
    "stage 2, buckets": {"stage": 2, "reduce_bucket_size": 2e8, "allgather_bucket_size": 1e8},
    "stage 2, overlap": {"stage": 2, "overlap_comm": True},
    "stage 3, no overlap": {"stage": 3, "overlap_comm": False},
    "stage 3, prefetch": {
        "stage": 3,
        "stage3_prefetch_bucket_size": 1e7,
        "stage3_param_persistence_threshold": 1e4,
    },
    "stage 3, names without prefix": {
        "stage": 3,
        "prefetch_bucket_size": 3e7,
        "max_live_parameters": 1e8,
        "max_reuse_distance": 1e7,
    },
    "stage 3, live": {"stage": 3, "stage3_max_live_parameters": 5e8, "sub_group_size": 1e8},
    "stage 2, optimizer offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "stage 3, offload": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu"},
    },
    "stage 3, nvme": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/x"},
        "offload_param": {"device": "nvme", "nvme_path": "/x"},
    },
    "stage 2, old offload": {"stage": 2, "cpu_offload": True},
    "stage 3, old offload": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True},
    "stage 3, ratio": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}},
    "stage 3, hpZ": {"stage": 3, "zero_hpz_partition_size": 8},
    "stage 3, quantized": {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    },
    "stage 3, 16-bit save": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "stage 2, scattered": {"stage": 2, "reduce_scatter": False, "contiguous_gradients": False},
}
_TOP: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "fp16": {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "no overflow check": {
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": {"stage": 2},
    },
    "clipping": {"gradient_clipping": 0.5},
    "accumulation": {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}},
    "communication dtype": {
        "communication_data_type": "fp32",
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    },
}


def cases() -> Iterator[Case]:
    """Yield ZeRO blocks in float32, and keys outside of them."""
    for name, block in _ZERO.items():
        yield _case(name, {"train_micro_batch_size_per_gpu": 2, "zero_optimization": block})
    for name, config in _TOP.items():
        yield _case(name, {"train_micro_batch_size_per_gpu": 2, **config})


def _case(name: str, config: Mapping[str, Any]) -> Case:
    return Case(
        name=name,
        config=config,
        fmt="deepspeed",
        theirs=partial(_fields, config),
        versions={"deepspeed": version("deepspeed")},
    )


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    from deepspeed.runtime.config import DeepSpeedConfig

    found = DeepSpeedConfig(copy.deepcopy(dict(config)))
    zero = found.zero_config
    stage = int(zero.stage)
    half = found.bfloat16_config.enabled or found.float16_config.enabled
    width = 2 if half else 4
    fields: dict[str, Any] = {
        "sharding.strategy": ("none", "optim", "optim_grads", "optim_grads_params")[stage],
        "batch.micro": found.train_micro_batch_size_per_gpu,
        "batch.accumulation": found.gradient_accumulation_steps,
        "optimizer.grad_clip": found.gradient_clipping,
    }
    if found.bfloat16_config.enabled:
        fields["precision.compute"] = "bfloat16"
        fields["precision.bf16_check_overflow"] = found.bfloat16_config.check_grad_overflow
    if found.communication_data_type is not None:
        name = str(found.communication_data_type).removeprefix("torch.")
        fields["precision.reduce"] = name
    if stage:
        fields |= _zero_fields(zero, stage, width)
    return fields


def _zero_fields(zero: Any, stage: int, width: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "comm.bucket_bytes": zero.reduce_bucket_size * width,
        "comm.overlap_grad_reduce": zero.overlap_comm,
        "comm.contiguous_gradients": zero.contiguous_gradients,
        "offload.optimizer": _device(zero.offload_optimizer),
    }
    if zero.offload_optimizer is not None:
        fields["offload.pin_memory"] = zero.offload_optimizer.pin_memory
    if stage < 3:
        fields["comm.allgather_bucket_bytes"] = zero.allgather_bucket_size * width
        fields["comm.reduce_scatter"] = zero.reduce_scatter
        return fields
    fields |= {
        "offload.params": _device(zero.offload_param),
        "comm.prefetch_bucket_bytes": zero.prefetch_bucket_size * width,
        "sharding.persist_threshold": zero.param_persistence_threshold,
        "sharding.max_live_parameters": zero.max_live_parameters,
        "sharding.max_reuse_distance": zero.max_reuse_distance,
        "optimizer.sub_group_size": zero.sub_group_size,
        "sharding.secondary_partition": zero.zero_hpz_partition_size,
        "comm.quantized_weights": zero.zero_quantized_weights,
        "comm.quantized_gradients": zero.zero_quantized_gradients,
        "ckpt.gather_16bit": zero.gather_16bit_weights_on_model_save,
    }
    if zero.offload_optimizer is not None and zero.offload_optimizer.ratio < 1:
        fields["offload.fraction"] = zero.offload_optimizer.ratio
    return fields


def _device(block: Any) -> str:
    return "none" if block is None else str(getattr(block.device, "value", block.device))
