"""The built-in GPT, made slower in its forward pass by a time that the spec says.

Named by import path in specs of ``step_time_power.py``: ``workload.model.factory``. On a GPU the
added time is a kernel that spins on the stream of the forward pass, on a CPU a sleep of the host.
"""

from __future__ import annotations

import time

import torch

from fsdp_doctor.model.spec import ModelSpec
from fsdp_doctor.training.gpt import GPT, next_token_loss

TOKEN_IDS = 64
"""Batches hold ids below this: the batch function is not told the vocabulary."""


class SlowedGPT(GPT):
    """(tokens, targets) -> next-token loss, after having waited."""

    def __init__(
        self, spec: ModelSpec, sequence_length: int, added_s: float, cycles_per_s: float
    ) -> None:
        super().__init__(spec, sequence_length)
        self.added_s, self.added_cycles = added_s, round(added_s * cycles_per_s)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Wait on the device, then compute the loss."""
        if tokens.is_cuda:
            if self.added_cycles:
                torch.cuda._sleep(self.added_cycles)  # noqa: SLF001 (torch has no public spin)
        elif self.added_s:
            time.sleep(self.added_s)
        return next_token_loss(super().forward(tokens), targets)


def build(
    *, sequence_length: int, added_s: float, cycles_per_s: float, **shape: int | bool | None
) -> SlowedGPT:
    """Return the model; ``shape``: fields of ``ModelSpec``; ``cycles_per_s``: of the GPU's clock.

    Both times are numbers of the spec, so the manifest of a run says what was added.
    """
    return SlowedGPT(ModelSpec(**shape), sequence_length, added_s, cycles_per_s)  # type: ignore[arg-type]


def batch(
    micro_batch: int, sequence_length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random (tokens, targets), both (micro_batch, sequence_length)."""
    tokens = torch.randint(0, TOKEN_IDS, (micro_batch, sequence_length), device=device)
    return tokens, tokens.roll(-1, 1)
