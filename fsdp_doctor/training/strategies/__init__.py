"""One file per data-parallel engine. Each wraps a model as a user would and says how gradient
synchronisation is put off in accumulation. Megatron-Core has a schedule of its own and is trained
by ``training.megatron_job``.
"""

from __future__ import annotations

from fsdp_doctor.model.spec import TrainingConfig
from fsdp_doctor.training.strategies.base import RankContext, Strategy


def make_strategy(config: TrainingConfig, context: RankContext) -> Strategy:
    """Return the strategy that ``config.strategy`` names."""
    if config.strategy == "ddp":
        from fsdp_doctor.training.strategies.ddp import DDPStrategy

        return DDPStrategy(config, context)
    if config.strategy == "fsdp1":
        from fsdp_doctor.training.strategies.fsdp1 import FSDP1Strategy

        return FSDP1Strategy(config, context)
    if config.strategy == "megatron_fsdp":
        from fsdp_doctor.training.strategies.megatron_standalone import MegatronFSDPStrategy

        return MegatronFSDPStrategy(config, context)
    from fsdp_doctor.training.strategies.fsdp2 import FSDP2Strategy

    return FSDP2Strategy(config, context)


__all__ = ["RankContext", "Strategy", "make_strategy"]
