"""Sees every CPU storage that operators make, resize and drop.

Storage level: a storage that appears in an operator's outputs for the first time is an
allocation; it dies when its last owner does. Memory that a kernel allocates and frees inside
itself is invisible at dispatch level.

A storage can die at any moment: in the middle of our own bookkeeping (a garbage collection) and in
another thread (gloo drops the tensors of a collective that it has finished). Deaths are told one
after the other, by whoever holds the turn; those that come meanwhile wait for its end.

Private: ``torch.utils._python_dispatch.TorchDispatchMode``, ``torch._C._current_autograd_node``,
``torch._C._current_graph_task_id``, ``UntypedStorage.resize_`` (replaced while the mode is on),
``ShardingPropagator`` of ``torch.distributed.tensor._sharding_prop`` (replaced likewise); torch
2.6 - 2.14.
"""
# ruff: noqa: SLF001

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp_doctor.profiler.observe.faults import Faults
from fsdp_doctor.profiler.observe.labels import plain_tensors

_ADD = torch.ops.aten.add.Tensor
_CAST = torch.ops.aten._to_copy.default
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PROPAGATION = (
    "propagate",
    "propagate_op_sharding_non_cached",
    "_propagate_tensor_meta",
    "_propagate_tensor_meta_non_cached",
)


class StorageSink(Protocol):
    """Whoever keeps the log of storages. Keys are unique among living storages."""

    def born(self, key: int, size: int, operator: str | None, cast_of: int | None) -> None:
        """A storage appears. ``cast_of``: the storage it is a dtype conversion of."""

    def resized(self, key: int, size: int) -> None:
        """A storage has another size (0: its memory was freed)."""

    def died(self, key: int) -> None:
        """A storage is gone."""

    def renamed(self, old: int, new: int) -> None:
        """The memory of ``old`` goes on as ``new`` (see ``_accumulated``)."""


class _Turn:
    """Who keeps the books: one thread, which may ask again; ``tidy`` runs first and last."""

    def __init__(self, tidy: Callable[[], None]) -> None:
        self._tidy = tidy
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._tidy()

    def __exit__(self, *_error: object) -> None:
        try:
            if self._depth == 1:
                self._tidy()
        finally:
            self._depth -= 1
            self._lock.release()

    def take_if_free(self) -> None:
        """Tidy now, unless somebody has the turn: they tidy at its end."""
        if self._lock.acquire(blocking=False):
            try:
                if self._depth == 0:
                    with self:
                        pass
            finally:
                self._lock.release()


class StorageMode(TorchDispatchMode):
    """The dispatch mode. ``device``: storages elsewhere (meta, another device) are not told."""

    def __init__(self, sink: StorageSink, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sink, self._device = sink, device
        self.faults = Faults()
        """Errors in our own code; the operator they came from has run and is answered."""
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._keys: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._nodes: dict[int, int] = {}
        self._next_key = 1
        self._suppressed = 0
        self._pending: tuple[int, int, int] | None = None
        self._restore: list[Callable[[], None]] = []
        self._dead: deque[int] = deque()
        self._turn = _Turn(self._bury)

    # -- life ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Enter the mode and replace what bypasses dispatch."""
        self._replace_resize()
        self._quiet_propagation()
        self.__enter__()  # type: ignore[no-untyped-call]

    def uninstall(self) -> None:
        """Leave the mode and put everything back; later calls do nothing."""
        if not self._restore:
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for undo in self._restore:
            undo()
        self._restore.clear()
        with self._turn:
            self._known.clear()

    def _replace_resize(self) -> None:
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            try:
                self.see_storage(storage, "aten.resize_")
            except Exception as error:  # noqa: BLE001 (the user's call is not to blame)
                self.faults.keep(error)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        # the method lives on a C base class: deleting ours uncovers it
        self._restore.append(partial(delattr, torch.UntypedStorage, "resize_"))

    def _quiet_propagation(self) -> None:
        """DTensor runs operators at global shapes to learn output layouts: no memory of ours."""
        for name in _PROPAGATION:
            original = ShardingPropagator.__dict__.get(name)
            if original is not None:
                setattr(ShardingPropagator, name, self._quiet(original))
                self._restore.append(partial(setattr, ShardingPropagator, name, original))

    def _quiet(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def quiet(*args: Any, **kwargs: Any) -> Any:
            self._suppressed += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._suppressed -= 1

        return quiet

    # -- storages -----------------------------------------------------------------------------

    def key_of(self, tensor: torch.Tensor) -> int | None:
        """The key of a tensor's storage, which is told first if it is new; None: elsewhere."""
        return self.see_storage(tensor.untyped_storage(), None)

    def see_storage(
        self, storage: torch.UntypedStorage, operator: object, cast_of: int | None = None
    ) -> int | None:
        """Tell about a storage that is new or has another size; return its key.

        ``operator``: what made it (anything whose ``str`` names it), or None.
        """
        with self._turn:
            self._bury()  # a storage that died since may have had this one's identity
            identity = id(storage)
            key = self._keys.get(identity)
            if key is None:
                if storage.device != self._device:
                    return None
                return self._add(storage, identity, operator, cast_of)
            size = storage.nbytes()
            if size != self._sizes[key]:
                self._tell_pending()
                self._sizes[key] = size
                self._sink.resized(key, size)
            return key

    def _add(
        self,
        storage: torch.UntypedStorage,
        identity: int,
        operator: object,
        cast_of: int | None,
    ) -> int:
        self._tell_pending()
        key = self._register(storage, identity)
        name = None if operator is None else str(operator)
        self._sink.born(key, self._sizes[key], name, cast_of)
        return key

    def _register(self, storage: torch.UntypedStorage, identity: int) -> int:
        key = self._next_key
        self._next_key += 1
        self._keys[identity] = key
        self._sizes[key] = storage.nbytes()
        self._known[identity] = weakref.ref(storage, partial(self._gone, identity))
        return key

    def _gone(self, identity: int, _dead: object) -> None:
        self._dead.append(identity)
        try:
            self._turn.take_if_free()
        except Exception as error:  # noqa: BLE001 (whoever dropped the storage is not to blame)
            self.faults.keep(error)

    def _bury(self) -> None:
        """Tell about the storages that have died, in the order of their deaths."""
        while self._dead:
            identity = self._dead.popleft()
            key = self._keys.pop(identity, None)
            self._known.pop(identity, None)
            if key is not None:
                del self._sizes[key]
                self._end(key)

    def _end(self, key: int) -> None:
        pending = self._pending
        if pending is not None and pending[0] == key:
            self._pending = None
            self._sink.renamed(key, pending[1])
            self._nodes[pending[1]] = self._nodes.pop(key, 0)
            return
        self._nodes.pop(key, None)
        self._tell_pending()
        self._sink.died(key)

    def flush(self) -> None:
        """Tell about a sum that did not replace its operand after all."""
        with self._turn:
            self._tell_pending()

    def _tell_pending(self) -> None:
        if self._pending is not None:
            _, key, size = self._pending
            self._pending = None
            self._sink.born(key, size, str(_ADD), None)

    # -- dispatch -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then look at the storages of its outputs."""
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if not self._suppressed and self.faults.first is None:
            try:
                with self._turn:
                    self._look(func, args, result)
            except Exception as error:  # noqa: BLE001 (the user's operator is not to blame)
                self.faults.keep(error)
        return result

    def _look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        node = _current_node()
        if func is _ADD and node and self._accumulated(args, result, node):
            return
        if type(result) in _PLAIN:
            cast_of = None
            if func is _CAST:
                cast_of = self._keys.get(id(args[0].untyped_storage()))
            self._output(result, func, node, cast_of)
        elif result is not None and not isinstance(result, (int, float, bool)):
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    for tensor in plain_tensors(leaf):
                        self._output(tensor, func, node, None)

    def _output(self, tensor: torch.Tensor, operator: Any, node: int, cast_of: int | None) -> None:
        key = self.see_storage(tensor.untyped_storage(), operator, cast_of)
        if key is not None and node and key not in self._nodes:
            self._nodes[key] = node

    def _accumulated(self, args: tuple[Any, ...], result: Any, node: int) -> bool:
        """Whether this addition is autograd's own accumulation of a gradient.

        Autograd adds in place when nobody else holds the running sum, but never while a dispatch
        mode is on (``at::isTensorSubclassLike`` in ``torch/csrc/autograd/input_buffer.cpp``). To
        log what a plain run does, the new storage is held back: if the old sum dies next, it
        takes over the old one's memory. A view is never added to in place: it holds its base. A
        formula's own addition is told apart by its first operand, which it made itself.
        """
        if len(args) < 2 or not isinstance(args[1], torch.Tensor) or torch.is_grad_enabled():
            return False
        old, new = args[0].untyped_storage(), result.untyped_storage()
        old_key = self._keys.get(id(old))
        if old_key is None or id(new) in self._keys or args[0]._is_view():
            return False
        old_node = self._nodes.get(old_key, 0)
        if not old_node or old_node == node or old.nbytes() != new.nbytes():
            return False
        self._tell_pending()
        key = self._register(new, id(new))
        self._nodes[key] = old_node
        self._pending = (old_key, key, new.nbytes())
        return True


def _current_node() -> int:
    """A number for the autograd node that is being evaluated; 0 outside of backward."""
    if torch._C._current_graph_task_id() == -1:
        return 0
    node = torch._C._current_autograd_node()
    return 0 if node is None else node._sequence_nr() + 1
