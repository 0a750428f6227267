"""Counts what a simulated step does: FLOPs, bytes moved, collectives, copies.

Sees the same operators as the memory tracker. FLOPs by torch's own formulas
(``torch.utils.flop_counter``), halved for causal attention, whose kernels skip what is masked.
Bytes of an operator: every operand read once, every output written once.

Private: ``OpOverload._schema``, ``ProcessGroup.unbox``.
"""
# ruff: noqa: SLF001

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fsdp_doctor.model.work import Collective, CollectiveKind, Copies, Kernel, StepWork
from fsdp_doctor.profiler.observe.labels import plain_tensors
from fsdp_doctor.simulator.compat import GPU, HOST, device_of

_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What is no tensor and holds none."""
_c10d: Any = dist.distributed_c10d
_FOREACH_ELEMENTS = 320 * 65536
"""What one launch of a foreach kernel covers at most: blocks x chunk
(``aten/src/ATen/native/cuda/MultiTensorApply.cuh``)."""
_SMALLEST_HOST_BYTES = 4096
"""Operators on the host below this only count steps or flags."""
_NO_KERNEL = ("empty", "new_empty", "_unsafe_view", "_reshape_alias", "is_pinned", "is_same_size")
_NO_KERNEL_NAMESPACES = ("prim", "profiler")
_GATHERING = ("embedding", "index_select", "gather", "index", "nll_loss_forward")
"""Operators that read of their first operand only what they put out."""
_OVERWRITING = ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_", "normal_", "random_")
"""Operators that do not read what they write; nor does any with an ``out`` argument."""
_ONLY_READ = {"_fused_adamw_": "grads", "_fused_adam_": "grads", "_fused_sgd_": "grads"}
"""Arguments that are written only with a gradient scaler, whatever the schema says."""
_COLLECTIVES: dict[str, CollectiveKind] = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
}


@dataclass(frozen=True, slots=True)
class _Schema:
    """What an operator's schema says of its operands."""

    name: str
    names: tuple[str, ...]
    written: frozenset[str]
    """Names of the arguments it writes."""
    returns_views: bool
    runs_kernel: bool


@cache
def _schema(operator: Any) -> _Schema:
    schema = operator._schema
    name = operator._overloadpacket.__name__
    written = frozenset(
        a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
    ) - {_ONLY_READ.get(name, "")}
    views = bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
    idle = name.startswith(_NO_KERNEL) or operator.namespace in _NO_KERNEL_NAMESPACES
    return _Schema(
        name=name,
        names=tuple(a.name for a in schema.arguments),
        written=written,
        returns_views=views,
        runs_kernel=not idle and (bool(written) or not views),
    )


class WorkCounter:
    """Counts the operators of the running step; ``begin`` says which step and phase that is."""

    def __init__(self) -> None:
        self._phase = ""
        self._step = -1
        self._items: Counter[Kernel | Collective] = Counter()
        self._copies: Counter[tuple[str, str]] = Counter()
        self._copy_counts: Counter[tuple[str, str]] = Counter()
        self.buckets: list[int] = []
        """Bytes of DDP's gradient buckets, once it has regrouped them."""

    def begin(self, step: int, phase: str) -> None:
        """A phase begins; a new step drops the counts of the one before."""
        if step != self._step:
            self._step = step
            self._items.clear()
            self._copies.clear()
            self._copy_counts.clear()
        self._phase = phase

    def kernel(self, name: str, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        """Count a kernel that no operator tells of."""
        if self._step >= 0:
            self._memory(name, [*plain_tensors(list(reads))], [*plain_tensors(list(writes))])

    def operator(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Count an operator that has run on shapes."""
        if self._step < 0:
            return
        schema = _schema(func)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(schema, args, out)
        elif schema.runs_kernel:
            self._compute(func, schema, args, kwargs, out)

    def reduce_buckets(self, sizes: Sequence[int], group_size: int, times: int) -> None:
        """Count DDP's all-reduces, which its reducer starts outside of torch's dispatcher."""
        for size in sizes:
            item = Collective(
                phase="backward",
                kind="all_reduce",
                payload_bytes=size,
                group_size=group_size,
                stride=1,
            )
            self._items[item] += times

    def work(self) -> StepWork:
        """The counts of the running step."""
        kernels = [replace(k, count=n) for k, n in self._items.items() if isinstance(k, Kernel)]
        sent = [replace(c, count=n) for c, n in self._items.items() if isinstance(c, Collective)]
        copies = [
            Copies(phase=p, place=where, total_bytes=n, count=self._copy_counts[p, where])  # type: ignore[arg-type]
            for (p, where), n in self._copies.items()
        ]
        return StepWork(kernels=tuple(kernels), collectives=tuple(sent), copies=tuple(copies))

    # -- operators ----------------------------------------------------------------------------

    def _compute(
        self, func: Any, schema: _Schema, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        named = dict(zip(schema.names, args, strict=False)) | dict(kwargs)
        reads = [t for name, value in named.items() for t in _reads(schema, name, value)]
        writes = [t for name in schema.written for t in _tensors(named.get(name))]
        if not schema.written:
            writes += _tensors(out)
        if not writes and not reads:
            return
        if self._crosses(reads, writes) or self._on_host(writes or reads, reads):
            return
        flops = _flops(func, named, args, kwargs, out)
        if not flops:
            self._memory(schema.name, reads, writes)
            return
        attention = "attention" in schema.name
        first = next((t for t in reads if t.is_floating_point()), reads[0])
        item = Kernel(
            phase=self._phase,
            operator=schema.name,
            kind="attention" if attention else "matmul",
            dtype=str(first.dtype).removeprefix("torch."),
            flops=flops,
            read_bytes=sum(map(_bytes, reads)),
            written_bytes=sum(map(_bytes, writes)),
        )
        self._items[item] += 1

    def _memory(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]
    ) -> None:
        written = sum(map(_bytes, writes))
        read = sum(map(_bytes, reads))
        if name in _GATHERING and reads:
            read = sum(map(_bytes, reads[1:])) + min(_bytes(reads[0]), written)
        if name == "all_gather_copy_in":
            read -= sum(_bytes(t) for t in writes)  # the whole buffer is an operand too
            written = read
        sample = (writes or reads)[0]
        launches = 1
        if name.startswith(("_foreach", "_fused_adam", "_fused_sgd")):
            elements = sum(t.numel() for t in writes) or sample.numel()
            launches = foreach_launches(elements)
        item = Kernel(
            phase=self._phase,
            operator=name,
            kind="memory",
            dtype=str(sample.dtype).removeprefix("torch."),
            flops=0,
            read_bytes=max(read, 0),
            written_bytes=max(written, 0),
            launches=launches,
        )
        self._items[item] += 1

    def _crosses(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> bool:
        """Count a copy between host and GPU."""
        if (
            len(writes) != 1
            or not reads
            or {device_of(t) for t in (*reads, *writes)} != {GPU, HOST}
        ):
            return False
        source = [t for t in reads if device_of(t) != device_of(writes[0])]
        if not source or max(map(_bytes, source)) < _bytes(writes[0]):
            return False
        self._copied("to_gpu" if device_of(writes[0]) == GPU else "to_host", _bytes(writes[0]))
        return True

    def _on_host(self, tensors: Sequence[torch.Tensor], reads: Sequence[torch.Tensor]) -> bool:
        """Count an operator on the host."""
        if any(device_of(t) == GPU for t in tensors):
            return False
        moved = sum(map(_bytes, (*tensors, *reads)))
        if moved >= _SMALLEST_HOST_BYTES:
            self._copied("host", moved)
        return True

    def _copied(self, place: str, amount: int) -> None:
        self._copies[self._phase, place] += amount
        self._copy_counts[self._phase, place] += 1

    # -- collectives --------------------------------------------------------------------------

    def _collective(self, schema: _Schema, args: Sequence[Any], out: Any) -> None:
        kind = _COLLECTIVES.get(schema.name)
        if kind is None:
            return
        payload = max(
            (sum(map(_bytes, _tensors(part))) for part in (*args[:2], out)),
            default=0,
        )
        size, stride = _group(args)
        item = Collective(
            phase=self._phase, kind=kind, payload_bytes=payload, group_size=size, stride=stride
        )
        self._items[item] += 1


def foreach_launches(elements: int) -> int:
    """How many launches a foreach kernel takes for so many elements."""
    return max(1, math.ceil(elements / _FOREACH_ELEMENTS))


def _group(args: Sequence[Any]) -> tuple[int, int]:
    """Size of the collective's group and the distance between its neighbouring ranks."""
    group = None
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group = dist.ProcessGroup.unbox(value)
    if group is None and isinstance(args[-1], str):  # functional collectives name it last
        group = _c10d._resolve_process_group(args[-1])
    ranks = _ranks(group) if group is not None else tuple(range(dist.get_world_size()))
    return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1


def _ranks(group: Any) -> tuple[int, ...]:
    known: Mapping[Any, Mapping[int, int]] = _c10d._world.pg_group_ranks
    for candidate, ranks in known.items():
        if candidate is group or getattr(candidate, "group_name", 0) == group.group_name:
            return tuple(ranks)
    return tuple(range(group.size()))


def _reads(schema: _Schema, name: str, value: Any) -> Iterator[torch.Tensor]:
    overwrites = name == "out" or schema.name in _OVERWRITING
    if not (overwrites and name in schema.written):
        yield from _tensors(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    if type(value) is FakeTensor:
        return [value]
    if value is None or isinstance(value, _PLAIN):
        return []
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    """Distinct bytes of a tensor: an expanded dimension is read once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return int(count)


def _flops(
    func: Any, named: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> int:
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0
    flops = int(formula(*args, **kwargs, out_val=out))
    return flops // 2 if named.get("is_causal") else flops
