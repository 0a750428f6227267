"""A training job that runs out of memory on purpose: one rank of several, on one GPU.

    python benchmarks/ooms/job.py CASE --out FOLDER [--limit BYTES] [--device cpu --tiny]

It writes ``peaks.json``: what every phase had at most. Where it runs out of memory the traceback
goes to standard error as any job's does, and ``snapshot.pickle`` and ``truth.json`` (the phase
that really ran) to the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from cases import OomCase, case_named
from faults import FAULTS, Peaks, prepare

from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.profiler.plan import LaunchPlan
from fsdp_doctor.profiler.worker import join_process_group
from fsdp_doctor.training.step import build_job
from fsdp_doctor.training.strategies import RankContext


def join(case: OomCase, out: Path, device: str) -> RankContext:
    """Join a process group: the fake one, or for one rank a real one."""
    if case.world_size > 1:
        plan = LaunchPlan(
            run_directory=str(out), spec={}, world_size=case.world_size,
            one_rank_of=case.world_size, device=device,
        )  # fmt: skip
        return join_process_group(plan, 0, 0)
    chosen = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(chosen)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return RankContext(rank=0, local_rank=0, world_size=1, device=chosen, fake=False)


def write(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    path.write_text(json.dumps(value))


def main() -> int:
    """Build the job and run the case's fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="bytes that PyTorch may reserve")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    case, out = case_named(options.case), options.out
    context = join(case, out, options.device)
    sink = Peaks(context.device)
    where = "cpu"
    if sink.cuda:
        where = torch.cuda.get_device_name(0)
        torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")  # noqa: SLF001
        if options.limit:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(options.limit / total, 1.0))
    print(f"torch {torch.__version__}, {where}, rank 0 of {case.world_size}", flush=True)
    try:
        prepare(sink, case)
        job = build_job(spec_from_mapping(case.spec(tiny=options.tiny), "case"), context, sink)
        FAULTS[case.fault](job, sink, case)
    except Exception as error:
        told = {"phase": sink.now, "step": sink.step, "phases_done": len(sink.phases)}
        write(out / "truth.json", {**told, "error": f"{type(error).__name__}: {error}"[:300]})
        if sink.cuda:
            torch.cuda.memory._dump_snapshot(str(out / "snapshot.pickle"))  # noqa: SLF001
        raise
    finally:
        write(out / "peaks.json", sink.phases)
    return 0


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # noqa: BLE001 (it is printed, and ends the job)
        sys.excepthook(*sys.exc_info())  # torch's own, with the rank
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # nothing is left to be torn down
