"""Megatron-Core's checkpoint formats: ``torch_dist``, ``fsdp_dtensor``, torch's DCP, and whole.

Written after what Megatron's own training loop (``megatron/training/checkpointing.py``) calls; only
model and optimizer are saved, no generators and no arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.training.checkpoints import Saver, read_dcp, write_dcp
from fsdp_doctor.training.strategies.base import RankContext


def megatron_saver(job: Any, spec: ProfileSpec, context: RankContext) -> Saver:
    """Return how the spec's format saves this job."""
    if spec.checkpoint == "torch_dist":
        return _torch_dist(job, spec)
    if spec.checkpoint == "fsdp_dtensor":
        return _fsdp_dtensor(job, spec, context)
    if spec.checkpoint == "full":
        return _whole(job, context)
    return _torch_dcp(job, context)


def _bare(model: Any) -> Any:
    """Return the model under its data-parallel and precision wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _torch_dist(job: Any, spec: ProfileSpec) -> Saver:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import (
        get_default_load_sharded_strategy,
        get_default_save_sharded_strategy,
    )
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}

    def state(*, loading: bool) -> dict[str, Any]:
        model = _bare(job.model).sharded_state_dict(metadata=metadata)
        optimizer = job.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}

    def save(folder: Path) -> None:
        if dist.get_rank() == 0:
            folder.mkdir(exist_ok=True)
        dist.barrier()
        strategy = get_default_save_sharded_strategy("torch_dist")
        if spec.config.megatron.checkpoint.fully_parallel_save:
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelSaveStrategyWrapper(strategy, group)
        dist_checkpointing.save(state(loading=False), str(folder), strategy)

    def load(folder: Path) -> None:
        strategy = get_default_load_sharded_strategy(str(folder))
        loaded = dist_checkpointing.load(state(loading=True), str(folder), strategy)
        _bare(job.model).load_state_dict(loaded["model"])
        job.optimizer.load_state_dict(loaded["optimizer"])

    return Saver(save=save, load=load, prepare=lambda: _gather(job))


def _gather(job: Any) -> None:
    """Gather the updated parameters now, where overlap would put it off to the next forward."""
    if getattr(job.wrapped.ddp_config, "overlap_param_gather", False):
        job.model.start_param_sync(force_sync=True)


def _fsdp_dtensor(job: Any, spec: ProfileSpec, context: RankContext) -> Saver:
    """DTensors of uneven shards, written by torch's DCP."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )

    def state(*, loading: bool) -> dict[str, Any]:
        _fill_state(job.optimizer)
        model = job.model.state_dict_for_save_checkpoint()
        optimizer = job.optimizer.sharded_state_dict(
            {"model": model},
            is_loading=loading,
            metadata={"distrib_optim_sharding_type": "fsdp_dtensor"},
        )
        made = {"model": dict(model), "optimizer": optimizer}
        if spec.config.megatron.model.gated_linear_unit:
            _split_gates(job, made)
        preprocess_state_dict_for_uneven_dtensor(made)
        return made

    def load(folder: Path) -> None:
        loaded = state(loading=True)
        read_dcp(loaded, folder, context)
        job.model.load_state_dict(loaded["model"], strict=False)
        job.optimizer.load_state_dict(loaded["optimizer"])

    return Saver(save=lambda folder: write_dcp(state(loading=False), folder, context), load=load)


def _fill_state(optimizer: Any) -> None:
    """Give every parameter optimizer state, also those of which this rank holds no element.

    torch's optimizers make none without a gradient, and then ranks disagree on what they save:
    chunks are agreed upon tensor by tensor, in the order of the state.
    """
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        state = inner.optimizer.state
        like: dict[str, Any] = next((values for values in state.values() if values), {})
        parameters = [p for group in inner.optimizer.param_groups for p in group["params"]]
        ordered = {p: state.get(p) or _empty_state(p, like) for p in parameters}
        state.clear()
        state.update(ordered)


def _empty_state(parameter: torch.Tensor, like: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if value.dim() == 0 else torch.zeros_like(parameter)
        for name, value in like.items()
    }


def _split_gates(job: Any, state: dict[str, Any]) -> None:
    """SwiGLU's two halves become two entries, as Megatron's training loop saves them."""
    from megatron.core.transformer.fsdp_dtensor_checkpoint import handle_swiglu_in_state_dict

    model, optimizer = handle_swiglu_in_state_dict(job.model, state["model"], state["optimizer"])
    state["model"], state["optimizer"] = model, optimizer


def _torch_dcp(job: Any, context: RankContext) -> Saver:
    """Megatron's torch-FSDP2 wrapper: state dicts of DTensors."""

    def state() -> dict[str, Any]:
        return {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}

    def load(folder: Path) -> None:
        loaded = state()
        read_dcp(loaded, folder, context)
        job.model.load_state_dict(loaded["model"])
        job.optimizer.load_state_dict(loaded["optimizer"])

    return Saver(save=lambda folder: write_dcp(state(), folder, context), load=load)


def _whole(job: Any, context: RankContext) -> Saver:
    """Megatron's legacy format for replicas: rank 0 writes all."""
    first = context.rank == 0

    def save(folder: Path) -> None:
        if first:
            folder.mkdir(exist_ok=True)
        dist.barrier()
        if first:
            state = {
                "model": _bare(job.model).state_dict(),
                "optimizer": job.optimizer.state_dict(),
            }
            torch.save(state, folder / "model.pt")
        dist.barrier()

    def load(folder: Path) -> None:
        # its own files, written a moment ago
        state = torch.load(folder / "model.pt", map_location="cpu", weights_only=False)
        _bare(job.model).load_state_dict(state["model"])
        job.optimizer.load_state_dict(state["optimizer"])

    return Saver(save=save, load=load)
