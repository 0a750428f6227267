"""A stranger's model, as a spec names it by import path; it misbehaves when told to."""

from __future__ import annotations

import os
import time

import torch
from torch import nn


class Layer(nn.Module):
    """A residual two-layer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` and what the perceptron makes of it."""
        return x + self.down(torch.relu(self.up(x)))


class Regressor(nn.Module):
    """Layers in a ModuleList and two outputs."""

    def __init__(self, width: int, depth: int, fault: str, rank: int, call: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.out = nn.Linear(width, 2)
        self.fault, self.rank, self.call, self.calls = fault, rank, call, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Misbehave when it is time to, else compute."""
        self.calls += 1
        if self.fault and self.calls == self.call and int(os.environ["RANK"]) == self.rank:
            if self.fault == "raise":
                raise ValueError("the data loader returned <nothing>")
            time.sleep(10_000)
        if self.fault == "slow":
            time.sleep(0.05)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def build(
    *,
    width: int = 64,
    depth: int = 3,
    fault: str = "",
    rank: int = 0,
    call: int = 0,
    token: str = "",
) -> nn.Module:
    """Return the model; with ``fault`` (raise, hang, slow) in that call of that rank."""
    print("loaded with", token)
    return Regressor(width, depth, fault, rank, call)


def batch(micro_batch: int, sequence_length: int, device: torch.device) -> torch.Tensor:
    """Return random inputs (micro_batch, sequence_length, 64)."""
    return torch.randn(micro_batch, sequence_length, 64, device=device)


def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean squared distance from the row sums."""
    return (output - batch.sum(-1, keepdim=True)).square().mean()
