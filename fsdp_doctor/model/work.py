"""What one training step of one rank does, counted: kernels, collectives, copies, work on the host.

Counts of equal items are kept, not the items, so the counts of a step of many layers stay small and
those of repeated layers add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KernelKind = Literal["matmul", "attention", "memory"]
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Equal operators on the GPU."""

    phase: str
    operator: str
    kind: KernelKind
    dtype: str
    """Of what is multiplied, as torch names it without ``torch.``."""
    flops: int
    """Of one; a multiplication and an addition are two."""
    read_bytes: int
    written_bytes: int
    launches: int = 1
    """Kernels that one operator starts."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Equal collectives of one process group."""

    phase: str
    kind: CollectiveKind
    payload_bytes: int
    """Of one: the gathered output, the input to reduce, the reduced tensor."""
    group_size: int
    stride: int
    """Distance between neighbouring ranks of the group."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies between host and GPU, or the memory traffic of operators on the host."""

    phase: str
    place: Literal["to_gpu", "to_host", "host"]
    total_bytes: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One step of one rank."""

    kernels: tuple[Kernel, ...] = ()
    collectives: tuple[Collective, ...] = ()
    copies: tuple[Copies, ...] = ()

    @property
    def flops(self) -> int:
        """Floating-point operations of the step."""
        return sum(kernel.flops * kernel.count for kernel in self.kernels)

    @property
    def communicated_bytes(self) -> int:
        """Payload of all collectives of the step."""
        return sum(item.payload_bytes * item.count for item in self.collectives)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """Seconds: the fastest and the slowest that is assumed."""

    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeGuess:
    """A first guess of a step's time. For direction and rank only: nothing is decided by it."""

    total: TimeRange
    """Low: peak rates, communication and copies hidden behind compute. High: nothing hidden."""
    compute: TimeRange
    communication: TimeRange
    copies: TimeRange
    """Between host and GPU, and the work of operators on the host."""
    launch: TimeRange
    """What the host needs to start the kernels."""
    phases: dict[str, TimeRange]
    flops: int
    communicated_bytes: int
    assumptions: tuple[str, ...] = ()
