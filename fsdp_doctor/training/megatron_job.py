"""A Megatron-Core training job: Megatron's own schedule and optimizer, phase by phase."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import ModelSizes
from fsdp_doctor.model.spec import ProfileSpec
from fsdp_doctor.training.megatron_model import (
    TokenBatches,
    build_gpt,
    transformer_config,
    transformer_layers,
)
from fsdp_doctor.training.megatron_setup import (
    fill,
    load_megatron,
    make_groups,
    section_values,
    uses_gloo,
)
from fsdp_doctor.training.sinks import PhaseSink
from fsdp_doctor.training.strategies.base import RankContext
from fsdp_doctor.training.strategies.megatron import Wrapped, wrap_megatron
from fsdp_doctor.training.workload import count_sizes

_ZEROING = -1
"""Micro step of the phase in which gradients are zeroed, before the first."""


class _Switch:
    """Moves from phase to phase where the code between them is Megatron's."""

    def __init__(self, sink: PhaseSink) -> None:
        self._sink = sink
        self._open: AbstractContextManager[None] | None = None

    def to(self, phase: Phase, microbatch: int) -> None:
        """End the phase that runs, begin another."""
        self.end()
        self._open = self._sink.phase(phase, microbatch)
        self._open.__enter__()

    def end(self) -> None:
        """End the phase that runs."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


@dataclass(slots=True)
class MegatronJob:
    """A wrapped model with all that a step needs."""

    spec: ProfileSpec
    config: Any
    wrapped: Wrapped
    optimizer: Any
    batches: TokenBatches
    device: torch.device
    sizes: ModelSizes
    core_version: str
    gradient_norm: float | None = None
    """Of the last step; None: not computed (``clip_grad: 0``)."""

    @property
    def model(self) -> nn.Module:
        """The wrapped model."""
        return self.wrapped.model

    def run_step(self, sink: PhaseSink) -> torch.Tensor:
        """Run one optimizer step with all its micro steps; return the last loss, detached."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        model: Any = self.model
        with sink.phase(Phase.OPTIMIZER, _ZEROING):
            model.zero_grad_buffer()
            self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        switch = _Switch(sink)

        def forward(_data: Any, wrapped: nn.Module) -> tuple[torch.Tensor, Any]:
            micro = len(losses)
            switch.to(Phase.DATA, micro)
            batch = self.batches()
            sink.inputs(batch)
            switch.to(Phase.FORWARD, micro)
            return wrapped(**batch), reduce

        def reduce(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = output.float().mean()
            losses.append(loss.detach().clone())
            switch.to(Phase.BACKWARD, len(losses) - 1)
            return loss, {}

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=[model],
            num_microbatches=self.spec.config.gradient_accumulation.steps,
            seq_length=self.spec.workload.sequence_length,
            micro_batch_size=self.spec.workload.micro_batch,
            forward_only=False,
        )
        switch.end()
        with sink.phase(Phase.OPTIMIZER):
            _, norm, _ = self.optimizer.step()
        self.gradient_norm = None if norm is None else float(norm)
        return losses[-1]

    def live_config(self) -> dict[str, dict[str, Any]]:
        """Return Megatron's config objects as they are now, by section of the spec."""
        return {
            "ddp": _plain(self.wrapped.ddp_config),
            "model": _plain(self.config),
            "optimizer": _plain(getattr(self.optimizer, "config", None)),
        }


def build_megatron_job(spec: ProfileSpec, context: RankContext, sink: PhaseSink) -> MegatronJob:
    """Build, wrap and equip Megatron's GPT for this rank. Phases ``init`` and ``wrap``."""
    version = load_megatron(context.device)
    megatron = spec.config.megatron
    with _refusals(), sink.phase(Phase.INIT):
        instances = megatron.ddp.num_distributed_optimizer_instances
        make_groups(context, megatron.dist, instances, spec.workload.seed)
        torch.manual_seed(spec.workload.seed)
        config = transformer_config(spec)
        model = build_gpt(spec, config, context.device)
        sizes = count_sizes(model, transformer_layers(model))
    with sink.phase(Phase.WRAP):
        wrapped = wrap_megatron(spec, context, config, model)
        optimizer = _optimizer(spec, context, wrapped)
    _connect(config, wrapped, optimizer)
    return MegatronJob(
        spec=spec,
        config=config,
        wrapped=wrapped,
        optimizer=optimizer,
        batches=TokenBatches(spec, context.device, context.rank),
        device=context.device,
        sizes=sizes,
        core_version=version,
    )


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise InputError(str(error) or "Megatron refused", where="config.megatron") from error


def _optimizer(spec: ProfileSpec, context: RankContext, wrapped: Wrapped) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    section = spec.config.megatron.optimizer
    # cpu:0 stands for a GPU where the job is simulated
    if section.optimizer_cpu_offload and context.device == torch.device("cpu"):
        raise InputError(
            "there is no GPU to offload the optimizer from",
            where="config.megatron.optimizer.optimizer_cpu_offload",
        )
    bf16 = spec.config.megatron.model.bf16
    made = {
        "min_lr": 0.0,
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "use_distributed_optimizer": wrapped.distributed_optimizer,
        "overlap_param_gather": getattr(wrapped.ddp_config, "overlap_param_gather", False),
    }
    config = fill(OptimizerConfig, "optimizer", section_values(section), made)
    gloo = uses_gloo(context, spec.config.megatron.dist)
    return get_megatron_optimizer(config, [wrapped.model], use_gloo_process_groups=gloo)


def _connect(config: Any, wrapped: Wrapped, optimizer: Any) -> None:
    """Hand the schedule its callbacks, as Megatron's own training loop does."""
    from megatron.core.distributed import finalize_model_grads

    model: Any = wrapped.model
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if getattr(wrapped.ddp_config, "overlap_grad_reduce", False):
        config.no_sync_func = model.no_sync
    if getattr(wrapped.ddp_config, "align_param_gather", False):
        config.param_sync_func = model.start_param_sync


def _plain(config: Any) -> dict[str, Any]:
    """Return a config object's simple values; dtypes by name."""
    if not dataclasses.is_dataclass(config):
        return {}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        if value is None or isinstance(value, (bool, int, float, str)):
            found[field.name] = value
        elif isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
            found[field.name] = list(value)
    return found
