"""Optimizers by spec."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fsdp_doctor.model.spec import OptimizerConfig


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return AdamW or SGD with the chosen implementation."""
    flags: dict[str, Any] = {
        "default": {},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "for_loop": {"foreach": False, "fused": False},
    }[config.implementation]
    if config.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            **flags,
        )
    return torch.optim.AdamW(
        parameters, lr=config.learning_rate, weight_decay=config.weight_decay, **flags
    )
