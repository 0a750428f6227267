"""FullyShardedDataParallel (FSDP1)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.spec import TrainingConfig
from fsdp_doctor.training.checkpointing import parse_dtype
from fsdp_doctor.training.strategies.base import RankContext, build_on_device
from fsdp_doctor.training.workload import TrainedModel


class FSDP1Strategy:
    """``torch.distributed.fsdp.FullyShardedDataParallel`` with its own arguments."""

    def __init__(self, config: TrainingConfig, context: RankContext) -> None:
        self._config, self._context = config.fsdp1, context

    def build(self, workload: TrainedModel, dtype: torch.dtype) -> nn.Module:
        """Build on the device; FSDP shards it from there."""
        return build_on_device(workload, dtype, self._context.device)

    def wrap(self, model: nn.Module, units: list[nn.Module], workload: TrainedModel) -> nn.Module:  # noqa: ARG002
        """Wrap the units, then the root."""
        chosen = {id(unit) for unit in units}
        device = self._context.device
        if self._config.cpu_offload and self._config.cpu_offload.offload_params:
            _check_can_pin(device)
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[self._config.sharding_strategy],
            mixed_precision=self._mixed_precision(),
            cpu_offload=CPUOffload(self._config.cpu_offload.offload_params)
            if self._config.cpu_offload
            else None,
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in chosen) if chosen else None,
            backward_prefetch=BackwardPrefetch[self._config.backward_prefetch]
            if self._config.backward_prefetch
            else None,
            forward_prefetch=self._config.forward_prefetch,
            limit_all_gathers=self._config.limit_all_gathers,
            use_orig_params=self._config.use_orig_params,
            device_id=device.index if device.type == "cuda" else device,
            device_mesh=self._context.mesh(self._config.mesh) if self._config.mesh else None,
        )

    def _mixed_precision(self) -> MixedPrecision | None:
        policy = self._config.mixed_precision
        if policy is None:
            return None
        return MixedPrecision(
            param_dtype=parse_dtype(policy.param_dtype),
            reduce_dtype=parse_dtype(policy.reduce_dtype),
            buffer_dtype=parse_dtype(policy.buffer_dtype),
            keep_low_precision_grads=policy.keep_low_precision_grads,
        )

    def microbatch(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        """``no_sync()`` unless gradients are to be reduced after this micro step."""
        assert isinstance(model, FullyShardedDataParallel)
        return nullcontext() if sync else model.no_sync()

    def grad_scaler(self, device_type: str) -> torch.amp.GradScaler:
        """Return the scaler that agrees on overflow across shards."""
        return ShardedGradScaler(device_type)


def _check_can_pin(device: torch.device) -> None:
    """FSDP1 pins its shards whatever is asked (``_flat_param.py``, torch 2.6 - 2.14)."""
    if device.type == "cpu":
        raise InputError(
            "FSDP1 pins offloaded parameters, which needs an accelerator",
            where="config.fsdp1.cpu_offload",
            hint="run it on a GPU, or use fsdp2 with offload_policy pin_memory: false",
        )
