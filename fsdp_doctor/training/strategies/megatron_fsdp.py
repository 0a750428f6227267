"""Megatron-FSDP through Megatron-Core's adapter."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp_doctor.errors import MissingDependencyError
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.training.strategies.base import RankContext
from fsdp_doctor.training.strategies.megatron import Wrapped, ddp_config, fsdp_dtypes


def wrap(spec: ProfileSpec, context: RankContext, config: Any, model: nn.Module) -> Wrapped:
    """Shard by ``data_parallel_sharding_strategy``; it brings the distributed optimizer.

    The adapter overwrites fields of its config (overlap with sharded gradients or parameters).
    """
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    if not getattr(mcore_fsdp_adapter, "HAVE_EINOPS", True):
        raise MissingDependencyError("einops", "profile Megatron-FSDP", "profile")
    ddp = ddp_config(
        spec,
        context,
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        **fsdp_dtypes(spec.config.megatron.ddp),
    )
    wrapped = mcore_fsdp_adapter.FullyShardedDataParallel(
        config=config, ddp_config=ddp, module=model
    )
    return Wrapped(model=wrapped, ddp_config=wrapped.ddp_config, distributed_optimizer=True)
