"""A first guess of a step's time: a roofline for kernels, alpha-beta for links.

The low end takes peak rates, and hides communication, copies and the host behind compute. The high
end takes the rates below and hides nothing but the host behind the GPU. Neither is fitted to
recorded runs (``benchmarks/step_time_guess.py`` says how they fare). No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fsdp_doctor.gpus_table import GpuSpeed
from fsdp_doctor.model.work import Copies, Kernel, StepTimeGuess, StepWork, TimeRange
from fsdp_doctor.simulator.collectives import GPUS_PER_HOST, collective_time

REACHED = {"matmul": 0.38, "attention": 0.35, "memory": 0.50}
"""Part of the peak that the high end assumes. matmul: the lowest utilisation that Llama 3 was
trained with, of the whole step (arXiv:2407.21783, table 4: 38 - 43 %). attention: FlashAttention-2
on Hopper (arXiv:2407.08608: 35 %). memory: assumed, half of what a plain copy nearly reaches."""
KERNEL_S = (0.5e-6, 3.8e-6)
"""Least time of a kernel: what one costs beside its work in a CUDA graph, and one launched into a
stream (NVIDIA, "Getting Started with CUDA Graphs": 3.4 - 2.9 and 3.8 microseconds)."""
HOST_S = (0.0, 20e-6)
"""Of the host for one eager operator with its autograd and module code; the high end is assumed."""
PCIE_REACHED = 0.25
"""High end of a copy: pageable memory goes through a staging buffer. Assumed."""
HOST_MEMORY = (307e9, 10e9)
"""Bytes a second of operators on the host: eight channels of DDR5-4800; one thread (assumed)."""

ASSUMPTIONS = (
    "step time is a first guess for direction and rank: nothing is decided by it",
    f"low: peak rates, all communication and copies hidden; high: {REACHED['matmul']:.0%} of the "
    f"peak in matmuls, {REACHED['attention']:.0%} in attention, {REACHED['memory']:.0%} of the "
    "memory bandwidth elsewhere, nothing hidden",
)


@dataclass(slots=True)
class _Sum:
    low: float = 0.0
    high: float = 0.0

    def add(self, low: float, high: float) -> None:
        self.low += low
        self.high += high

    def range(self) -> TimeRange:
        return TimeRange(low_s=self.low, high_s=self.high)


def guess_step_time(
    work: StepWork,
    speed: GpuSpeed,
    *,
    gpus_per_host: int = GPUS_PER_HOST,
    communicates: bool = True,
) -> StepTimeGuess:
    """Return the range of a step's time.

    ``communicates``: False leaves collectives out, as in a run of one rank of many.
    """
    compute = _by_phase((k.phase, *_kernel(k, speed)) for k in work.kernels)
    launch = _by_phase((k.phase, *_launch(k)) for k in work.kernels)
    copies = _by_phase((c.phase, *_copy(c, speed)) for c in work.copies)
    sent: dict[str, _Sum] = {}
    if communicates:
        times = ((c, collective_time(c, speed, gpus_per_host)) for c in work.collectives)
        sent = _by_phase((c.phase, t.low_s * c.count, t.high_s * c.count) for c, t in times)
    zero = _Sum()
    phases = {}
    for name in dict.fromkeys((*compute, *copies, *sent)):
        parts = [group.get(name, zero) for group in (compute, launch, sent, copies)]
        on_gpu, host, links, moved = parts
        phases[name] = TimeRange(
            low_s=max(part.low for part in parts),
            high_s=max(on_gpu.high, host.high) + links.high + moved.high,
        )
    return StepTimeGuess(
        total=TimeRange(
            low_s=sum(phase.low_s for phase in phases.values()),
            high_s=sum(phase.high_s for phase in phases.values()),
        ),
        compute=_total(compute),
        communication=_total(sent),
        copies=_total(copies),
        launch=_total(launch),
        phases=phases,
        flops=work.flops,
        communicated_bytes=work.communicated_bytes if communicates else 0,
        assumptions=(*ASSUMPTIONS, f"{gpus_per_host} GPUs a host; rates: {speed.source}"),
    )


def faster(a: StepTimeGuess, b: StepTimeGuess) -> float:
    """Relative change of step time from ``a`` to ``b``, by the middle of both ranges.

    The middle is the geometric one, so that a factor counts alike at both ends.
    """
    return middle_s(b.total) / middle_s(a.total) - 1


def middle_s(times: TimeRange) -> float:
    """Return the geometric middle of a range."""
    return float((times.low_s * times.high_s) ** 0.5)


def _by_phase(items: Iterable[tuple[str, float, float]]) -> dict[str, _Sum]:
    sums: dict[str, _Sum] = {}
    for phase, low, high in items:
        sums.setdefault(phase, _Sum()).add(low, high)
    return sums


def _total(sums: Mapping[str, _Sum]) -> TimeRange:
    total = _Sum()
    for part in sums.values():
        total.add(part.low, part.high)
    return total.range()


def _kernel(kernel: Kernel, speed: GpuSpeed) -> tuple[float, float]:
    """Seconds of all kernels that are equal to this one.

    At the low end operands that fit into the L2 cache together are there already.
    """
    peak = _peak_flops(kernel.dtype, speed)
    moved = kernel.read_bytes + kernel.written_bytes
    fetched = moved if moved > speed.l2_bytes else kernel.written_bytes
    low = max(
        kernel.flops / peak,
        fetched / speed.memory_bytes_per_s,
        kernel.launches * KERNEL_S[0],
    )
    high = max(
        kernel.flops / (peak * REACHED[kernel.kind]),
        moved / (speed.memory_bytes_per_s * REACHED["memory"]),
        kernel.launches * KERNEL_S[1],
    )
    return low * kernel.count, high * kernel.count


def _launch(kernel: Kernel) -> tuple[float, float]:
    return HOST_S[0] * kernel.count, HOST_S[1] * kernel.count


def _peak_flops(dtype: str, speed: GpuSpeed) -> float:
    if dtype == "float16" or (dtype == "bfloat16" and speed.bfloat16):
        return speed.half_flops
    return speed.float32_flops / 2 if dtype == "float64" else speed.float32_flops


def _copy(copies: Copies, speed: GpuSpeed) -> tuple[float, float]:
    if copies.place == "host":
        return copies.total_bytes / HOST_MEMORY[0], copies.total_bytes / HOST_MEMORY[1]
    rate = speed.pcie_bytes_per_s
    return copies.total_bytes / rate, copies.total_bytes / (rate * PCIE_REACHED)
