"""Megatron-Core's wrapper around torch's ``fully_shard``."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.training.strategies.base import RankContext
from fsdp_doctor.training.strategies.megatron import Wrapped


def wrap(spec: ProfileSpec, context: RankContext, config: Any, model: nn.Module) -> Wrapped:  # noqa: ARG001 (the engines share a signature)
    """Shard with torch; its only setting is whether to reshard after forward."""
    from megatron.core.distributed import TorchFullyShardedDataParallel
    from megatron.core.distributed.torch_fully_sharded_data_parallel_config import (
        TorchFullyShardedDataParallelConfig,
    )

    ddp = TorchFullyShardedDataParallelConfig(
        reshard_after_forward=spec.config.megatron.dist.torch_fsdp2_reshard_after_forward
    )
    wrapped = TorchFullyShardedDataParallel(config=config, ddp_config=ddp, module=model)
    return Wrapped(model=wrapped, ddp_config=ddp, distributed_optimizer=False)
