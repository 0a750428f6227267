"""Megatron-Core's DistributedDataParallel, alone or under its distributed optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.training.strategies.base import RankContext
from fsdp_doctor.training.strategies.megatron import Wrapped, ddp_config


def wrap(spec: ProfileSpec, context: RankContext, config: Any, model: nn.Module) -> Wrapped:
    """Lay parameters and gradients into contiguous buffers and hook their reduction."""
    from megatron.core.distributed import DistributedDataParallel

    ddp = ddp_config(spec, context)
    wrapped = DistributedDataParallel(config=config, ddp_config=ddp, module=model)
    return Wrapped(
        model=wrapped,
        ddp_config=wrapped.ddp_config,
        distributed_optimizer=ddp.use_distributed_optimizer,
    )
