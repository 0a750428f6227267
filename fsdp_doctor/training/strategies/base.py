"""What a strategy is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_doctor.model.spec import MeshConfig
from fsdp_doctor.training.workload import TrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Where this process stands in the job."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    fake: bool = False
    """True: torch's fake process group; collectives return at once and move nothing."""

    def mesh(self, config: MeshConfig | None) -> DeviceMesh:
        """Return the 2-D (replicate, shard) mesh, or one dimension over all ranks."""
        if config is None:
            return init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("shard",))
        return init_device_mesh(
            self.device.type,
            (config.replicate, config.shard),
            mesh_dim_names=("replicate", "shard"),
        )


class Strategy(Protocol):
    """A data-parallel engine."""

    def build(self, workload: TrainedModel, dtype: torch.dtype) -> nn.Module:
        """Return the unwrapped model where this engine wants it (device, host or meta)."""

    def wrap(self, model: nn.Module, units: list[nn.Module], workload: TrainedModel) -> nn.Module:
        """Return the wrapped model, on the device, ready to train."""

    def microbatch(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        """Return the context of one micro step; ``sync``: gradients are reduced after it."""

    def grad_scaler(self, device_type: str) -> torch.amp.GradScaler:
        """Return the loss scaler that suits this engine."""


def build_on_device(workload: TrainedModel, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build on ``device`` and cast; a stranger's model is moved there if it was built elsewhere."""
    with device:
        model = workload.build()
    model = model.to(device=device, dtype=dtype)
    workload.init_weights(model)
    return model
