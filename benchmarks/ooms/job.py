"""A training job that runs out of memory on purpose: one rank of 8, on one GPU.

    python benchmarks/ooms/job.py CASE --out FOLDER [--limit BYTES] [--device cpu --tiny]

Without ``--limit`` it runs through and writes ``peaks.json``: what every phase reserved. With it
the case's fault ends in an out of memory: the traceback goes to standard error as any job's does,
and ``snapshot.pickle`` and ``truth.json`` (the phase that really ran) to the folder.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cases import OomCase, case_named

from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.model.memory import Phase
from fsdp_doctor.profiler.plan import LaunchPlan
from fsdp_doctor.profiler.worker import join_process_group
from fsdp_doctor.training.step import build_job

STEPS = 4
MIB = 1 << 20


class Peaks:
    """Notes the phase that runs, and what each one reserved."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.now = "init"
        self.step = 0
        self.reserved: dict[str, int] = {}

    @contextmanager
    def phase(self, phase: Phase, microbatch: int = 0) -> Iterator[None]:  # noqa: ARG002
        """One phase of a step."""
        self.now = str(phase)
        yield
        self.note(str(phase))

    def note(self, name: str) -> None:
        """Keep the largest reserved memory of a phase."""
        if self.cuda:
            size = torch.cuda.max_memory_reserved()
            self.reserved[name] = max(size, self.reserved.get(name, 0))

    def inputs(self, batch: Any) -> None:
        """Batches are of no interest."""


def allocated_text(sink: Peaks) -> str:
    """The memory part of a step's line."""
    size = torch.cuda.memory_allocated() if sink.cuda else 0
    return f"memory allocated {size / (1 << 30):.2f} GiB"


def train(job: Any, sink: Peaks, steps: int) -> None:
    """Ordinary steps with a line each."""
    for _ in range(steps):
        loss = job.run_step(sink)
        print(f"step {sink.step} loss {float(loss):.4f} {allocated_text(sink)}", flush=True)
        sink.step += 1
    if "step" not in sink.reserved:  # before anything is done wrong
        sink.note("step")


def plain(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """Only train."""
    train(job, sink, STEPS)


def later_optimizer(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """State is made first, then the optimizer's copies of later steps need room."""
    job.optimizer.defaults["foreach"] = False
    for group in job.optimizer.param_groups:
        group["foreach"] = False
    train(job, sink, 2)
    for group in job.optimizer.param_groups:
        group["foreach"] = True
    train(job, sink, 2)
    sink.note("fault")


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
    sink.now = "fault"
    print("***** Running evaluation *****", flush=True)
    evaluate(job, 2 if not sink.cuda else 16)
    sink.note("fault")


def save_checkpoint(job: Any, folder: Path) -> None:
    """A full copy of model and optimizer on the device before it is written."""
    state = {name: whole(value) for name, value in job.model.state_dict().items()}
    moments = [
        {key: whole(value) for key, value in slots.items() if torch.is_tensor(value)}
        for slots in job.optimizer.state.values()
    ]
    torch.save({"model": state, "optimizer": moments}, folder / "checkpoint.pt")


def whole(value: torch.Tensor) -> torch.Tensor:
    """The whole tensor, a copy."""
    full = getattr(value, "full_tensor", None)
    return (full() if full is not None else value).detach().clone()


def checkpoint(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """Train, then save."""
    train(job, sink, 2)
    sink.now = "fault"
    print("saving checkpoint", flush=True)
    save_checkpoint(job, OUT)
    sink.note("fault")
    (OUT / "checkpoint.pt").unlink()


def leak(job: Any, sink: Peaks, case: OomCase) -> None:
    """Something of every step is kept."""
    history = []
    for _ in range(STEPS if not sink.cuda else 24):
        train(job, sink, 1)
        size = int(case.extra["mib"] * MIB) if sink.cuda else 4096
        history.append(torch.ones(size // 4, device=job.device))
    sink.note("fault")


def fragmentation(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """Small blocks that stay pin segments whose rest is free; then a large request comes."""
    train(job, sink, 2)
    sink.now = "fault"
    unit = 64 * MIB if sink.cuda else 4096
    pin = unit // 21  # what is left beside a block is split off where it is above 1 MiB
    kept, freed = [], []
    for _ in range(40):
        segment = torch.empty(unit, dtype=torch.uint8, device=job.device)
        del segment
        freed.append(torch.empty(unit - pin, dtype=torch.uint8, device=job.device))
        kept.append(torch.empty(pin, dtype=torch.uint8, device=job.device))
    sink.note("pinned")
    freed.clear()
    large = torch.empty(unit * 16, dtype=torch.uint8, device=job.device)
    sink.note("fault")
    del large, kept


def fill_device(leave: int) -> None:
    """Take the rest of the device by the driver, outside of PyTorch's pool."""
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    pointer = ctypes.c_uint64()
    size = ctypes.c_size_t(max(free - leave, 0))
    code = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(pointer), size)
    print(f"held {size.value} bytes outside the pool, status {code}", flush=True)


def cublas(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """The first matrix product finds no room for cuBLAS."""
    sink.now = "fault"
    left = torch.ones(256, 256, device=job.device)
    if sink.cuda:
        fill_device(leave=4 * MIB)
    print(float((left @ left).sum()), flush=True)


def driver(job: Any, sink: Peaks, case: OomCase) -> None:  # noqa: ARG001
    """A kernel's module is loaded when the device is full."""
    sink.now = "fault"
    values = torch.rand(1 << 16, device=job.device)
    if sink.cuda:
        fill_device(leave=2 * MIB)
    print(float(torch.linalg.svdvals(values.view(256, 256)).sum()), flush=True)


FAULTS: dict[str, Callable[[Any, Peaks, OomCase], None]] = {
    f.__name__: f
    for f in (plain, later_optimizer, evaluation, checkpoint, leak, fragmentation, cublas, driver)
}
OUT = Path()


def main() -> int:
    """Build the job and run the case's fault."""
    global OUT  # noqa: PLW0603 (a script)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="bytes that PyTorch may reserve")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    case = case_named(options.case)
    OUT = options.out
    plan = LaunchPlan(
        run_directory=str(OUT), spec={}, world_size=8, one_rank_of=8, device=options.device
    )
    context = join_process_group(plan, 0, 0)
    sink = Peaks(context.device)
    if sink.cuda:
        torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")  # noqa: SLF001
        if options.limit:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(options.limit / total)
    try:
        job = build_job(spec_from_mapping(case.spec(tiny=options.tiny), "case"), context, sink)
        FAULTS[case.fault](job, sink, case)
    except Exception:
        if sink.cuda:
            torch.cuda.memory._dump_snapshot(str(OUT / "snapshot.pickle"))  # noqa: SLF001
        truth = {"phase": sink.now, "step": sink.step}
        (OUT / "truth.json").write_text(json.dumps(truth))
        raise
    (OUT / "peaks.json").write_text(json.dumps(sink.reserved))
    return 0


if __name__ == "__main__":
    sys.exit(main())
