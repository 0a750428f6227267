"""What is done wrong in a training job: one function per fault."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from cases import OomCase
from torch.nn import functional

from fsdp_doctor.model.memory import Phase

STEPS = 4
LEAKING_STEPS = 24
MIB = 1 << 20


class Peaks:
    """The phases that ran, in order, with the most memory that each one had."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.now = "init"
        self.step = 0
        self.phases: list[dict[str, Any]] = []
        """``step, phase, allocated, reserved`` (bytes, peaks within the phase)."""
        self.before: dict[str, Callable[[], None]] = {}
        """What is done when a phase begins."""

    @contextmanager
    def phase(self, phase: Phase | str, microbatch: int = 0) -> Iterator[None]:  # noqa: ARG002
        """One phase of a step."""
        self.now = str(phase)
        self.before.pop(self.now, lambda: None)()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        yield
        allocated = torch.cuda.max_memory_allocated() if self.cuda else 0
        reserved = torch.cuda.max_memory_reserved() if self.cuda else 0
        self.phases.append(
            {"step": self.step, "phase": self.now, "allocated": allocated, "reserved": reserved}
        )

    def inputs(self, batch: Any) -> None:
        """Batches are of no interest."""


def train(job: Any, sink: Peaks, steps: int) -> None:
    """Ordinary steps with a line each."""
    for _ in range(steps):
        loss = float(job.run_step(sink))
        size = torch.cuda.memory_allocated() if sink.cuda else 0
        print(f"step {sink.step} loss {loss:.4f} memory allocated {size / (1 << 30):.2f} GiB",
              flush=True)  # fmt: skip
        sink.step += 1


def plain(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """Only train."""
    train(job, sink, STEPS)


def longer_batch(job: Any, sink: Peaks, case: OomCase) -> None:
    """After some steps a micro batch with many more samples comes."""
    train(job, sink, 3)
    samples = case.extra["micro_batch"] if sink.cuda else 2
    if hasattr(job, "batches"):  # Megatron's
        batches = job.batches
        positions = batches._positions  # noqa: SLF001
        batches._shape = (samples, batches._shape[1])  # noqa: SLF001
        batches._positions = positions[:1].repeat(samples, 1)  # noqa: SLF001
    else:
        data = job.workload
        data._workload = replace(data._workload, micro_batch=samples)  # noqa: SLF001
    train(job, sink, 1)


def later_foreach(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """State is made first, then the optimizer's copies of later steps need room."""
    for foreach in (False, True):
        for group in job.optimizer.param_groups:
            group["foreach"] = foreach
        train(job, sink, 2)


def evaluate(job: Any, batches: int) -> float:
    """Keep every batch's logits, as metrics over a whole data set do."""
    outputs = []
    with torch.no_grad(), torch.autocast(job.device.type, dtype=torch.bfloat16):
        for _ in range(batches):
            tokens, _ = job.workload.batch()
            outputs.append(job.model(tokens))
    return float(torch.stack([output.float().mean() for output in outputs]).mean())


def evaluation(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """Train, then evaluate."""
    train(job, sink, 2)
    print("***** Running evaluation *****", flush=True)
    with sink.phase("fault"):
        evaluate(job, 24 if sink.cuda else 2)


class _Nowhere(io.RawIOBase):
    """A file that takes everything."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return len(data)


def save_checkpoint(job: Any) -> None:
    """A full copy of model and optimizer on the device before it is written."""
    state = {name: whole(value) for name, value in job.model.state_dict().items()}
    moments = [
        {key: whole(value) for key, value in slots.items() if torch.is_tensor(value)}
        for slots in job.optimizer.state.values()
    ]
    torch.save({"model": state, "optimizer": moments}, _Nowhere())


def whole(value: torch.Tensor) -> torch.Tensor:
    """The whole tensor, a copy."""
    full = getattr(value, "full_tensor", None)
    return (full() if full is not None else value).detach().clone()


def checkpoint(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """Train, then save."""
    train(job, sink, 2)
    print("saving checkpoint", flush=True)
    with sink.phase("fault"):
        save_checkpoint(job)


def leak(job: Any, sink: Peaks, case: OomCase) -> None:
    """Something of every step is kept."""
    history = []
    for _ in range(LEAKING_STEPS if sink.cuda else STEPS):
        train(job, sink, 1)
        size = case.extra["mib"] * MIB if sink.cuda else 4096
        history.append(torch.ones(size // 4, device=job.device))


def fragmentation(job: Any, sink: Peaks, case: OomCase) -> None:
    """Small blocks that stay pin segments whose rest is free; then a large request comes."""
    train(job, sink, 2)
    unit = case.extra["mib"] * MIB if sink.cuda else 1 << 16
    pin = unit // 32
    kept, freed = [], []
    with sink.phase("pinned"):
        if sink.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(case.extra["pieces"]):
            segment = torch.empty(unit, dtype=torch.uint8, device=job.device)
            del segment
            freed.append(torch.empty(unit - pin, dtype=torch.uint8, device=job.device))
            kept.append(torch.empty(pin, dtype=torch.uint8, device=job.device))
    with sink.phase("fault"):
        freed.clear()
        torch.empty(unit * case.extra["pieces"] // 2, dtype=torch.uint8, device=job.device)


def fill_pool(large: int) -> None:
    """Let PyTorch's pool have free segments, so that it is not what finds no memory."""
    small = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(128)]
    block = torch.empty(large, dtype=torch.uint8, device="cuda")
    del small, block


def fill_device() -> None:
    """Take the rest of the device by the driver, outside of PyTorch's pool."""
    torch.cuda.synchronize()
    allocate = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2
    pointer, size = ctypes.c_uint64(), 1 << 35
    while size >= 64 << 10:
        if allocate(ctypes.byref(pointer), ctypes.c_size_t(size)) != 0:
            size //= 2


def cublas(job: Any, sink: Peaks, case: OomCase) -> None:
    """The first matrix product finds no room for cuBLAS."""
    if sink.cuda:
        fill_pool(8 << 30)
        tokens, _ = job.workload.batch()  # the kernels that come before it are loaded
        table = torch.randn(case.vocab, case.hidden, device=job.device)
        table[0].fill_(1.0)
        rows = functional.rms_norm(functional.embedding(tokens, table), (case.hidden,), table[0])
        half = rows.to(torch.bfloat16)
        del table, tokens, rows, half
        fill_device()
    train(job, sink, 1)


def driver(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """Kernels that training has not used yet are loaded when the device is full."""
    train(job, sink, 2)
    values = torch.rand(256, 256, device=job.device)
    if sink.cuda:
        fill_pool(1 << 30)
        fill_device()
    with sink.phase("fault"):
        found = [statistics(values.to(kind)) for kind in (torch.float32, torch.float64, torch.half)]
        print(f"statistics {found}", flush=True)


def statistics(values: torch.Tensor) -> float:
    """Figures of a batch that nothing in a training step needs: some thirty kernels."""
    flat = values.flatten()
    ranked = torch.sort(flat).values.cumsum(0)
    top = torch.topk(values, 8).values.erfinv().nan_to_num().sum()
    spread = torch.logcumsumexp(values, 0).tril().roll(1, 0).flip(0).sum()
    middle = values.kthvalue(9, dim=1).values.sum() + values.median(dim=1).values.sum()
    kinds = torch.unique((flat * 64).to(torch.int32), return_counts=True)[1].to(torch.int64)
    gamma = values.lgamma().sum() + values.digamma().sum() + torch.special.i0e(values).sum()
    total = ranked[-1] + top + spread + middle + gamma + kinds.bincount().prod()
    return float(total)


def cufft(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """The first Fourier transform finds no room for cuFFT."""
    train(job, sink, 2)
    values = torch.rand(256, 256, device=job.device)
    if sink.cuda:
        fill_pool(1 << 30)
        fill_device()
    with sink.phase("fault"):
        print(f"spectrum {float(torch.fft.fft2(values).abs().sum()):.2f}", flush=True)


def nccl(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """The communicator is made when the device is full (see ``prepare``)."""
    train(job, sink, 1)


def prepare(sink: Peaks, case: OomCase) -> None:
    """What a fault needs before the job is built."""

    def fill() -> None:
        fill_pool(8 << 30)
        fill_device()

    if case.fault == "nccl" and sink.cuda:
        sink.before["wrap"] = fill


FAULTS: dict[str, Callable[[Any, Peaks, OomCase], None]] = {
    f.__name__: f
    for f in (
        *(plain, longer_batch, later_foreach, evaluation, checkpoint, leak, fragmentation),
        *(cublas, driver, cufft, nccl),
    )
}
