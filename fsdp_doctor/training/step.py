"""One training step, the same for every strategy, for the profiler and for the simulator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import ModelSizes
from fsdp_doctor.model.spec import ProfileSpec, TrainingConfig
from fsdp_doctor.training.checkpointing import (
    apply_checkpointing,
    compile_blocks,
    find_units,
    parse_dtype,
)
from fsdp_doctor.training.optimizers import build_optimizer
from fsdp_doctor.training.sinks import PhaseSink
from fsdp_doctor.training.strategies import RankContext, Strategy, make_strategy
from fsdp_doctor.training.workload import TrainedModel, count_sizes, load_workload

if TYPE_CHECKING:
    from fsdp_doctor.training.megatron_job import MegatronJob


@dataclass(slots=True)
class TrainingJob:
    """A wrapped model with all that a step needs."""

    config: TrainingConfig
    workload: TrainedModel
    strategy: Strategy
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    device: torch.device
    sizes: ModelSizes
    gradient_norm: float | torch.Tensor | None = None
    """Of the last step, before clipping; None: not computed (``max_grad_norm: null``)."""

    def run_step(self, sink: PhaseSink) -> torch.Tensor:
        """Run one optimizer step with all its micro steps; return the last loss, detached."""
        accumulation = self.config.gradient_accumulation
        loss = torch.zeros(())
        for micro in range(accumulation.steps):
            last = micro == accumulation.steps - 1
            sync = last or accumulation.sync == "every_microbatch"
            with sink.phase(Phase.DATA, micro):
                batch = self.workload.batch()
                sink.inputs(batch)
            with self.strategy.microbatch(self.model, sync=sync):
                loss = self._forward_backward(batch, micro, sink)
        with sink.phase(Phase.OPTIMIZER):
            self._update()
        return loss

    def _forward_backward(self, batch: Any, micro: int, sink: PhaseSink) -> torch.Tensor:
        with sink.phase(Phase.FORWARD, micro):
            with self._autocast():
                loss = self.workload.loss(self.model, batch)
            steps = self.config.gradient_accumulation.steps
            scaled = loss / steps if steps > 1 else loss
            if self.scaler is not None:
                scaled = self.scaler.scale(scaled)
        with sink.phase(Phase.BACKWARD, micro):
            scaled.backward()
        return loss.detach()

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = parse_dtype(self.config.precision.autocast)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def _update(self) -> None:
        limit = self.config.optimizer.max_grad_norm
        if limit is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.gradient_norm = clip_grad_norm(self.model, limit)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def clip_grad_norm(model: nn.Module, limit: float) -> torch.Tensor:
    """Clip as the engine asks for and return the norm: FSDP1 has a method of its own, the others
    torch's function.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(limit)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def build_job(
    spec: ProfileSpec, context: RankContext, sink: PhaseSink
) -> TrainingJob | MegatronJob:
    """Build, wrap and equip the model of ``spec`` for this rank.

    Every rank seeds alike, so replicas agree without a broadcast. Phases ``init`` and ``wrap``.
    """
    config = spec.config
    if config.strategy == "megatron":
        from fsdp_doctor.training.megatron_job import build_megatron_job

        return build_megatron_job(spec, context, sink)
    workload = load_workload(spec.workload, context.device, context.rank)
    strategy = make_strategy(config, context)
    dtype = parse_dtype(config.precision.parameters)
    assert dtype is not None
    with sink.phase(Phase.INIT):
        torch.manual_seed(spec.workload.seed)
        model = strategy.build(workload, dtype)
    with sink.phase(Phase.WRAP):
        apply_checkpointing(model, config.activation_checkpointing)
        units = find_units(model, _wrap_policy(config))
        sizes = count_sizes(model, units)
        if config.compile:
            compile_blocks(model)
        model = strategy.wrap(model, units, workload)
        optimizer = build_optimizer(model.parameters(), config.optimizer)
        equip = getattr(strategy, "equip", None)
        if equip is not None:
            optimizer = equip(optimizer)
        scaler = strategy.grad_scaler(context.device.type) if config.precision.grad_scaler else None
    return TrainingJob(
        config=config,
        workload=workload,
        strategy=strategy,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        device=context.device,
        sizes=sizes,
    )


def _wrap_policy(config: TrainingConfig) -> str | list[str]:
    if config.strategy == "fsdp1":
        return config.fsdp1.wrap
    if config.strategy == "fsdp2":
        return config.fsdp2.wrap
    if config.strategy == "megatron_fsdp":
        return config.megatron_fsdp.wrap
    return "none"
