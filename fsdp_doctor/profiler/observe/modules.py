"""Which module runs, forward and backward: public hooks of torch only (2.6 - 2.14)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fsdp_doctor.profiler.observe.faults import Faults

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
_CLAIMED = "fsdp_doctor_module"


class ModuleSink(Protocol):
    """Whoever wants to know which module runs."""

    def enter_module(self, module: str) -> None:
        """A forward begins."""

    def leave_module(self, module: str) -> None:
        """A forward ends, or an exception leaves it."""

    def enter_backward(self, module: str) -> None:
        """Backward reaches the output of a module."""


def clean_name(name: str, *, ddp: bool = False) -> str:
    """Drop the wrappers' own steps from a dotted path.

    ``module`` is dropped only at the front and only under DDP: a user's model may have a child
    of that name.
    """
    parts = name.split(".")
    if ddp and parts[0] == "module":
        del parts[0]
    return ".".join(part for part in parts if part not in _WRAPPERS)


def module_names(model: nn.Module) -> dict[int, str]:
    """``id(module)`` -> dotted path without wrappers; the model itself is ``""``."""
    ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    return {id(m): clean_name(name, ddp=ddp) for name, m in model.named_modules()}


def eager_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules outside of ``torch.compile``: a hook inside would break the compiled graph.

    Private: ``nn.Module._compiled_call_impl`` (2.2+), class ``OptimizedModule``.
    """
    compiled = type(model).__name__ == "OptimizedModule"
    if compiled or getattr(model, "_compiled_call_impl", None) is not None:
        return
    yield model
    for child in model.children():
        yield from eager_modules(child)


class ModuleWatcher:
    """Hooks every eager module of a model and tells ``sink`` what runs.

    ``on_forward`` is called with each module when its forward begins.
    """

    def __init__(
        self,
        sink: ModuleSink,
        on_forward: Callable[[nn.Module], None],
        faults: Faults | None = None,
    ) -> None:
        self._sink, self._on_forward = sink, on_forward
        self._faults = faults or Faults()
        self._names: dict[int, str] = {}
        self._handles: list[RemovableHandle] = []
        self._last_linear: tuple[str, int] | None = None
        self.head_module: str | None = None
        """The linear layer whose output is the model's output, when it was seen."""

    @property
    def names(self) -> dict[int, str]:
        """``id(module)`` -> dotted path."""
        return self._names

    def watch(self, model: nn.Module) -> None:
        """Hook the modules that are not hooked yet; take over the new names of the others."""
        known = set(self._names)
        self._names = module_names(model)
        for module in eager_modules(model):
            if id(module) in known:
                continue
            self._handles.append(module.register_forward_pre_hook(self._before))
            self._handles.append(module.register_forward_hook(self._after, always_call=True))

    def remove(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._names.clear()

    def _before(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002
        try:
            self._sink.enter_module(self._names.get(id(module), type(module).__name__))
            self._on_forward(module)
        except Exception as error:  # noqa: BLE001 (the user's forward is not to blame)
            self._faults.keep(error)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        try:
            self._leave(module, output)
        except Exception as error:  # noqa: BLE001 (the user's forward is not to blame)
            self._faults.keep(error)

    def _leave(self, module: nn.Module, output: Any) -> None:
        name = self._names.get(id(module), type(module).__name__)
        if output is not None:
            self._find_head(module, name, output)
            self._mark_backward(name, output)
        self._sink.leave_module(name)

    def _find_head(self, module: nn.Module, name: str, output: Any) -> None:
        """The model's output comes straight from a linear layer: that layer is the head."""
        if not isinstance(output, torch.Tensor):
            return
        if isinstance(module, nn.Linear):
            self._last_linear = (name, output.untyped_storage()._cdata)  # noqa: SLF001
        elif name == "" and self._last_linear is not None and self.head_module is None:
            linear, storage = self._last_linear
            if output.untyped_storage()._cdata == storage:  # noqa: SLF001
                self.head_module = linear

    def _mark_backward(self, name: str, output: Any) -> None:
        """Ask autograd to say when backward reaches ``output``; inner modules come first."""
        if not torch.is_grad_enabled():
            return
        for tensor in tree_leaves(output):
            node = tensor.grad_fn if isinstance(tensor, torch.Tensor) else None
            if node is None:
                continue
            # torch's stub says method; it is a property that returns the node's own dict
            notes = cast("dict[str, str]", node.metadata)
            if _CLAIMED in notes:
                continue
            notes[_CLAIMED] = name
            node.register_prehook(lambda _gradients, name=name: self._sink.enter_backward(name))
