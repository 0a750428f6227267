"""fully_shard (FSDP2), with a 2-D mesh for HSDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from fsdp_doctor.model.spec import TrainingConfig
from fsdp_doctor.training.checkpointing import parse_dtype
from fsdp_doctor.training.strategies.base import RankContext, build_on_device
from fsdp_doctor.training.workload import BuiltinGPT, TrainedModel


class FSDP2Strategy:
    """``torch.distributed.fsdp.fully_shard`` with its own arguments."""

    def __init__(self, config: TrainingConfig, context: RankContext) -> None:
        self._config, self._context = config.fsdp2, context

    def build(self, workload: TrainedModel, dtype: torch.dtype) -> nn.Module:
        """Build the built-in model on the meta device, as large models are; others on the device
        (on the host when parameters are offloaded).
        """
        if isinstance(workload, BuiltinGPT):
            with torch.device("meta"):
                return workload.build().to(dtype)
        return build_on_device(workload, dtype, self._home())

    def _home(self) -> torch.device:
        return torch.device("cpu") if self._config.offload_policy else self._context.device

    def wrap(self, model: nn.Module, units: list[nn.Module], workload: TrainedModel) -> nn.Module:
        """Shard each unit, then the root; then give meta parameters their storage."""
        options = self._options()
        group = self._config.blocks_per_unit if self._config.wrap == "block" else 1
        for start in range(0, len(units), group):
            chunk = units[start : start + group]
            fully_shard(chunk if len(chunk) > 1 else chunk[0], **options)
        fully_shard(model, **options)
        if any(p.is_meta for p in model.parameters()):
            model.to_empty(device=self._home())
            if self._config.offload_policy:
                for name, buffer in list(model.named_buffers()):
                    owner = model.get_submodule(name.rpartition(".")[0])
                    setattr(owner, name.rpartition(".")[2], buffer.to(self._context.device))
            workload.init_weights(model)
        return model

    def _options(self) -> dict[str, Any]:
        policy, offload = self._config.mp_policy, self._config.offload_policy
        options: dict[str, Any] = {
            "mesh": self._context.mesh(self._config.mesh),
            "offload_policy": CPUOffloadPolicy(pin_memory=offload.pin_memory)
            if offload
            else OffloadPolicy(),
        }
        if policy is not None:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=parse_dtype(policy.param_dtype),
                reduce_dtype=parse_dtype(policy.reduce_dtype),
                output_dtype=parse_dtype(policy.output_dtype),
                cast_forward_inputs=policy.cast_forward_inputs,
            )
        if self._config.reshard_after_forward is not None:
            options["reshard_after_forward"] = self._config.reshard_after_forward
        return options

    @contextmanager
    def _synchronised(self, model: FSDPModule, sync: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(sync)
        yield

    def microbatch(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        """``set_requires_gradient_sync`` for this micro step."""
        assert isinstance(model, FSDPModule)
        return self._synchronised(model, sync)

    def grad_scaler(self, device_type: str) -> torch.amp.GradScaler:
        """Return torch's loss scaler (DTensor gradients are supported)."""
        return torch.amp.GradScaler(device_type)
