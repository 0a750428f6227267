"""DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.spec import TrainingConfig
from fsdp_doctor.training.strategies.base import RankContext, build_on_device
from fsdp_doctor.training.workload import TrainedModel

_COMPRESSED = {"fp16_compress": torch.float16, "bf16_compress": torch.bfloat16}


class DDPStrategy:
    """``torch.nn.parallel.DistributedDataParallel`` with its own arguments."""

    def __init__(self, config: TrainingConfig, context: RankContext) -> None:
        self._config, self._context = config.ddp, context

    def build(self, workload: TrainedModel, dtype: torch.dtype) -> nn.Module:
        """Build the replica on the device."""
        return build_on_device(workload, dtype, self._context.device)

    def wrap(self, model: nn.Module, units: list[nn.Module], workload: TrainedModel) -> nn.Module:  # noqa: ARG002
        """Wrap; under the fake process group a hook stands in for all-reduce."""
        wrapped = DistributedDataParallel(
            model,
            bucket_cap_mb=self._config.bucket_cap_mb,
            gradient_as_bucket_view=self._config.gradient_as_bucket_view,
            static_graph=self._config.static_graph,
            find_unused_parameters=self._config.find_unused_parameters,
        )
        hook = self._config.comm_hook
        if self._context.fake:
            wrapped.register_comm_hook(_COMPRESSED.get(hook), _local_hook)
        elif hook != "none":
            if hook == "bf16_compress" and self._context.device.type == "cpu":
                raise InputError(
                    "torch's bf16 compression hook needs NCCL",
                    where="config.ddp.comm_hook",
                    hint="use fp16_compress on a CPU",
                )
            wrapped.register_comm_hook(
                dist.group.WORLD,
                default_hooks.fp16_compress_hook
                if hook == "fp16_compress"
                else default_hooks.bf16_compress_hook,
            )
        return wrapped

    def microbatch(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[Any]:
        """``no_sync()`` unless gradients are to be reduced after this micro step."""
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if sync else model.no_sync()

    def grad_scaler(self, device_type: str) -> torch.amp.GradScaler:
        """Return torch's loss scaler."""
        return torch.amp.GradScaler(device_type)


def _local_hook(compressed: torch.dtype | None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Stand in for all-reduce: the same buffers, no other rank (fake work returns no tensor)."""
    buffer = bucket.buffer()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    if compressed is None:
        future.set_result(buffer)
    else:
        small = buffer.to(compressed).div_(dist.get_world_size())
        future.set_result(buffer.copy_(small))
    return future


# torch checks a hook's annotations against its own classes; as strings they would not match
_local_hook.__annotations__.clear()
