"""Megatron-Core's engines: one file each, chosen by Megatron's own switches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.megatron_spec import MegatronDDP
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.training.megatron_setup import fill, section_values, torch_dtype
from fsdp_doctor.training.strategies.base import RankContext

_FSDP_DTYPES = (
    "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_grad_comm_dtype",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """A model as a Megatron engine wrapped it."""

    model: nn.Module
    ddp_config: Any
    """The live config object; the engine may have overwritten fields of it."""
    distributed_optimizer: bool


def wrap_megatron(
    spec: ProfileSpec, context: RankContext, config: Any, model: nn.Module
) -> Wrapped:
    """Wrap the model with the engine that the spec's switches choose.

    Raises InputError when this version of Megatron-Core refuses the config.
    """
    engine = spec.config.megatron.engine
    try:
        if engine == "mcore_torch_fsdp2":
            from fsdp_doctor.training.strategies.megatron_torch_fsdp2 import wrap
        elif engine == "megatron_fsdp":
            from fsdp_doctor.training.strategies.megatron_fsdp import wrap
        else:
            from fsdp_doctor.training.strategies.megatron_ddp import wrap
        return wrap(spec, context, config, model)
    except (AssertionError, ValueError) as error:
        text = str(error) or f"{engine} refused this config ({type(error).__name__})"
        raise InputError(text, where="config.megatron") from error


def ddp_config(spec: ProfileSpec, context: RankContext, **made: Any) -> Any:
    """Return Megatron's ``DistributedDataParallelConfig`` with the spec's values and ``made``.

    What Megatron's own start-up sets is set here too: the bucket size with overlap.
    """
    from megatron.core.distributed import DistributedDataParallelConfig

    ddp: MegatronDDP = spec.config.megatron.ddp
    asked = section_values(ddp, *_FSDP_DTYPES)
    values: dict[str, Any] = {
        "use_megatron_fsdp": False,
        "bucket_size": _bucket_size(ddp, context.world_size),
        "gradient_reduce_div_fusion": ddp.gradient_reduce_div_fusion and can_divide(context),
        **made,
    }
    return fill(DistributedDataParallelConfig, "ddp", asked, values)


def fsdp_dtypes(ddp: MegatronDDP) -> dict[str, torch.dtype | None]:
    """Return Megatron-FSDP's three dtypes (0.17 and later)."""
    return {name: torch_dtype(getattr(ddp, name)) for name in _FSDP_DTYPES}


def can_divide(context: RankContext) -> bool:
    """Whether the communication backend knows ``PREMUL_SUM`` (NCCL does, gloo does not)."""
    return context.device.type == "cuda"


def _bucket_size(ddp: MegatronDDP, ranks: int) -> int | None:
    if not ddp.overlap_grad_reduce:
        return ddp.bucket_size
    return ddp.bucket_size or max(40_000_000, 1_000_000 * ranks)
