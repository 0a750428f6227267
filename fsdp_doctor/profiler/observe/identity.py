"""Asks, at the border of every phase, what model and optimizer hold, and counts it by shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fsdp_doctor.memory.events import Label
from fsdp_doctor.model.memory import Category
from fsdp_doctor.profiler.observe.faults import Faults
from fsdp_doctor.profiler.observe.labels import flat_params, fsdp2_params, held_by, plain_tensors

_COUNTED = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
_WHOLE_GRADIENT = Label(Category.UNSHARDED_GRADIENTS)


class IdentityScanner:
    """Tells who holds which storage.

    ``label`` is called with every tensor found and returns the bytes of its storage as the
    allocator rounds them, or None when it is not on the observed device. ``hint`` is called in
    backward with each whole gradient of a sharded parameter.
    """

    def __init__(
        self,
        label: Callable[[torch.Tensor, Label], int | None],
        hint: Callable[[torch.Tensor, Label], None],
        faults: Faults | None = None,
    ) -> None:
        self._label, self._hint = label, hint
        self._faults = faults or Faults()
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._names: dict[int, str] = {}
        self._hooked: set[int] = set()
        self._handles: list[RemovableHandle] = []
        self.expected_bytes: dict[str, int] = {}
        """parameters, gradients, optimizer_state: sums over the storages held, by shape."""

    def watch(self, model: nn.Module, optimizer: Optimizer | None, names: dict[int, str]) -> None:
        """Take note of whom to ask. ``names``: ``id(module)`` -> dotted path."""
        self._model, self._names = model, names
        if optimizer is not None:
            self._optimizer = optimizer

    def remove(self) -> None:
        """Remove the hooks and forget model and optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._model = self._optimizer = None

    def scan(self, *, gradients_complete: bool) -> None:
        """Label everything that is held now; count gradients only when backward has ended."""
        if self._model is None:
            return
        self._hook_gradients(self._model)
        sums = dict.fromkeys((category.value for category in _COUNTED), 0)
        seen: set[int] = set()
        for tensor, label in held_by(self._model, self._optimizer, self._names):
            storage = tensor.untyped_storage()._cdata  # noqa: SLF001
            if storage in seen:
                continue
            seen.add(storage)
            size = self._label(tensor, label)
            if size is not None and label.category in _COUNTED:
                sums[label.category.value] += size
        if not gradients_complete:
            del sums[Category.GRADIENTS.value]
        self.expected_bytes.update(sums)

    def float_weights(self) -> dict[str, tuple[int, ...]]:
        """Module -> elements of each of its float32 weights: what autocast may cast."""
        found: dict[str, tuple[int, ...]] = {}
        for module in self._model.modules() if self._model is not None else ():
            sizes = tuple(w.numel() for w in _weights(module) if w.dtype is torch.float32)
            if sizes:
                found[self._names.get(id(module), "")] = sizes
        return found

    def _hook_gradients(self, model: nn.Module) -> None:
        """Hook the leaves whose gradients are whole: FSDP's unsharded and flat parameters."""
        leaves = [getattr(param, "_unsharded_param", None) for param in fsdp2_params(model)]
        leaves += [flat for _, flat in flat_params(model)]
        for leaf in leaves:
            if leaf is None or not leaf.requires_grad or id(leaf) in self._hooked:
                continue
            self._hooked.add(id(leaf))
            self._handles.append(leaf.register_post_accumulate_grad_hook(self._on_gradient))

    def hook_views(self, module: nn.Module) -> None:
        """A module's forward begins: hook the views of a flat parameter that it is about to use.

        Their gradients exist one by one before autograd joins them (FSDP1).
        """
        for view in _weights(module):
            if view.grad_fn is not None and view.requires_grad:
                self._handles.append(view.register_hook(self._on_view_gradient))

    def _on_view_gradient(self, gradient: torch.Tensor) -> None:
        self._hint_whole(gradient)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._hint_whole(parameter.grad)

    def _hint_whole(self, gradient: torch.Tensor | None) -> None:
        try:
            for tensor in plain_tensors(gradient):
                self._hint(tensor, _WHOLE_GRADIENT)
        except Exception as error:  # noqa: BLE001 (the user's backward is not to blame)
            self._faults.keep(error)


def _weights(module: nn.Module) -> list[torch.Tensor]:
    """A module's own parameters, and the views that FSDP1 puts in their place as attributes."""
    held = [*module.parameters(recurse=False), *vars(module).values()]
    return [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
