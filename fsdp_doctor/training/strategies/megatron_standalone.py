"""The standalone ``megatron_fsdp`` package: ``fully_shard_model`` and ``fully_shard_optimizer``.

Beside megatron-core it needs core 0.19 or later: it imports core's config class where it can.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fsdp_doctor.errors import MissingDependencyError
from fsdp_doctor.model.spec import TrainingConfig
from fsdp_doctor.training.checkpointing import parse_dtype
from fsdp_doctor.training.strategies.base import RankContext, build_on_device
from fsdp_doctor.training.workload import TrainedModel


class MegatronFSDPStrategy:
    """``megatron_fsdp.fully_shard_model`` with its own arguments."""

    def __init__(self, config: TrainingConfig, context: RankContext) -> None:
        self._config, self._context = config.megatron_fsdp, context
        if context.device.type == "cpu":
            from fsdp_doctor.training import megatron_cpu

            megatron_cpu.install()
        try:
            self._package: Any = importlib.import_module("megatron_fsdp")
        except ImportError:
            raise MissingDependencyError(
                "megatron-fsdp", "profile the standalone Megatron-FSDP", "profile"
            ) from None

    def build(self, workload: TrainedModel, dtype: torch.dtype) -> nn.Module:
        """Build on the device; it is sharded from there."""
        return build_on_device(workload, dtype, self._context.device)

    def wrap(self, model: nn.Module, units: list[nn.Module], workload: TrainedModel) -> nn.Module:  # noqa: ARG002
        """Shard; the classes of the units are its ``fsdp_unit_modules``."""
        config = self._config
        options: dict[str, Any] = {}
        if self._context.device.type == "cpu":  # gloo has no PREMUL_SUM: gradients are summed
            options["calculate_per_token_loss"] = True
        wrapped: nn.Module = self._package.fully_shard_model(
            module=model,
            fsdp_unit_modules=list({type(unit) for unit in units}) or None,
            zero_dp_strategy=config.zero_dp_strategy,
            overlap_grad_reduce=config.overlap_grad_reduce,
            overlap_param_gather=config.overlap_param_gather,
            average_in_collective=config.average_in_collective,
            fsdp_double_buffer=config.fsdp_double_buffer,
            sync_model_each_microbatch=False,
            mixed_precision_policy=self._package.MixedPrecisionPolicy(
                main_params_dtype=parse_dtype(config.main_params_dtype),
                main_grads_dtype=parse_dtype(config.main_grads_dtype),
                grad_comm_dtype=parse_dtype(config.grad_comm_dtype),
            ),
            **options,
        )
        return wrapped

    def equip(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let ``step`` wait for gradients and install the updated weights."""
        equipped: torch.optim.Optimizer = self._package.fully_shard_optimizer(optimizer)
        return equipped

    def microbatch(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        """``no_sync()`` unless gradients are to be reduced after this micro step."""
        context: AbstractContextManager[Any] = nullcontext() if sync else model.no_sync()  # type: ignore[operator]
        return context

    def grad_scaler(self, device_type: str) -> torch.amp.GradScaler:
        """Return torch's loss scaler."""
        return torch.amp.GradScaler(device_type)
