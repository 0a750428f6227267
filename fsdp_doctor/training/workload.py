"""The model, its batches and its loss: built-in, or the user's own by import path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.run import ModelSizes
from fsdp_doctor.model.spec import Workload
from fsdp_doctor.training.gpt import GPT, next_token_loss


class TrainedModel(Protocol):
    """What the step needs to know of a workload."""

    def build(self) -> nn.Module:
        """Return the model, on whatever device is current."""

    def init_weights(self, model: nn.Module) -> None:
        """Fill the parameters in place where the workload knows how; else leave them."""

    def batch(self) -> Any:
        """Return one micro batch on the device."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Run the forward pass and return the scalar loss."""


class BuiltinGPT:
    """The built-in GPT on random tokens."""

    def __init__(self, workload: Workload, device: torch.device, rank: int) -> None:
        self._workload, self._device = workload, device
        self._generator = torch.Generator(device).manual_seed(workload.seed * 100_003 + rank)

    def build(self) -> nn.Module:
        """Return a GPT of the spec's shape."""
        return GPT(self._workload.model, self._workload.sequence_length)

    def init_weights(self, model: nn.Module) -> None:
        """Initialise the GPT inside ``model``, also one that was built on the meta device."""
        for module in model.modules():
            if isinstance(module, GPT):
                module.init_weights()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens, targets), both (micro_batch, sequence_length)."""
        shape = (self._workload.micro_batch, self._workload.sequence_length)
        tokens = torch.randint(
            0, self._workload.model.vocab, shape, device=self._device, generator=self._generator
        )
        return tokens, tokens.roll(-1, 1)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the next-token loss."""
        tokens, targets = batch
        return next_token_loss(model(tokens), targets)


class UserModel:
    """A model, batch and loss of the user's own, by import path."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        assert workload.model.factory is not None
        assert workload.model.batch is not None
        self._workload, self._device = workload, device
        self._factory = import_function(workload.model.factory, "workload.model.factory")
        self._batch = import_function(workload.model.batch, "workload.model.batch")
        self._loss = (
            import_function(workload.model.loss, "workload.model.loss")
            if workload.model.loss
            else None
        )

    def build(self) -> nn.Module:
        """Call the factory."""
        model = self._factory(**self._workload.model.kwargs)
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{self._workload.model.factory} returned {type(model).__name__}, "
                "not a torch.nn.Module",
                where="workload.model.factory",
            )
        return model

    def init_weights(self, model: nn.Module) -> None:
        """Leave a stranger's model as its factory made it."""

    def batch(self) -> Any:
        """Call the user's batch function."""
        return self._batch(self._workload.micro_batch, self._workload.sequence_length, self._device)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Call the model, then find or compute the loss."""
        if isinstance(batch, dict):
            output = model(**batch)
        elif isinstance(batch, tuple):
            output = model(*batch)
        else:
            output = model(batch)
        if self._loss is not None:
            output = self._loss(output, batch)
        elif isinstance(output, dict) and "loss" in output:
            output = output["loss"]
        else:
            output = getattr(output, "loss", output)
        if not (isinstance(output, torch.Tensor) and output.numel() == 1):
            raise InputError(
                "the model's output is not a scalar loss",
                where="workload.model.loss",
                hint="name a function (output, batch) -> scalar tensor",
            )
        return output


def load_workload(workload: Workload, device: torch.device, rank: int) -> TrainedModel:
    """Return the workload's model on ``device``; batches differ by ``rank``."""
    if workload.model.factory is None:
        return BuiltinGPT(workload, device, rank)
    return UserModel(workload, device)


def import_function(path: str, where: str) -> Callable[..., Any]:
    """Return the function named ``package.module:function``; the current folder is importable.

    Raises InputError when module or function cannot be had.
    """
    module_name, _, function_name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"cannot import {path!r}: {error}", where=where) from None
    if not callable(function):
        raise InputError(f"{path!r} is not callable", where=where)
    return function  # type: ignore[no-any-return]


def count_sizes(model: nn.Module, units: list[nn.Module]) -> ModelSizes:
    """Count the trainable parameters of an unwrapped model, in all and per wrap unit."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    seen: set[int] = set()
    per_unit = []
    for unit in units:
        own = [p for p in unit.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(id(p) for p in own)
        per_unit.append(sum(p.numel() for p in own))
    root = sum(p.numel() for p in trainable if id(p) not in seen)
    return ModelSizes(
        parameters=sum(p.numel() for p in trainable),
        parameter_bytes=sum(p.numel() * p.element_size() for p in trainable),
        buffers_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        unit_parameters=(root, *per_unit),
    )
