"""Record memory snapshots of whole training steps on a GPU, for ``allocator_replay.py``.

    python benchmarks/record_snapshots.py -o FOLDER [--jobs 3] [--device cpu --tiny]

Each is a job of its own: one rank of 8, from before the model is built to the end of the third
step, every allocation, no stacks (some 100 kB each). It takes one CUDA device and minutes at most;
a job that fails is named and does not stop the others.
"""

from __future__ import annotations

import argparse
import gzip
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SPECS = Path(__file__).parent.parent / "profiles" / "h200" / "specs"
WORLD_SIZE = 8
STEPS = 3
TIMEOUT_S = 200
TINY = (
    "workload.model.layers=2",
    "workload.model.hidden=64",
    "workload.model.heads=4",
    "workload.model.ffn=128",
    "workload.model.vocab=512",
    "workload.micro_batch=1",
    "workload.sequence_length=64",
)
JOBS: tuple[tuple[str, str], ...] = (
    ("fsdp2-reshard", ""),
    ("fsdp2-reshard", "expandable_segments:True"),
    ("fsdp2-reshard", "max_split_size_mb:128"),
    ("fsdp2-reshard", "roundup_power2_divisions:4"),
    ("fsdp1-full-shard", ""),
    ("fsdp1-full-shard", "expandable_segments:True"),
    ("ddp", ""),
    ("ddp", "expandable_segments:True"),
    ("fsdp2-checkpoint-full", "expandable_segments:True"),
)
"""Spec, and PYTORCH_CUDA_ALLOC_CONF."""


class _Nobody:
    """Listens to nothing."""

    @contextmanager
    def phase(self, phase: Any, microbatch: int = 0) -> Iterator[None]:  # noqa: ARG002
        """No phases are marked: the trace has no place for them."""
        yield

    def inputs(self, batch: Any) -> None:
        """Batches are of no interest."""


def record(spec_name: str, output: Path, device: str, *, tiny: bool) -> None:
    """Run the job in this process and write its snapshot. A process is good for one."""
    import torch

    from fsdp_doctor.config.spec import load_written_spec
    from fsdp_doctor.profiler.plan import LaunchPlan
    from fsdp_doctor.profiler.worker import join_process_group
    from fsdp_doctor.training.step import build_job

    changes = (f"world_size={WORLD_SIZE}", *(TINY if tiny else ()))
    spec = load_written_spec(SPECS / f"{spec_name}.yaml", changes).spec
    plan = LaunchPlan(
        run_directory=str(output.parent),
        spec={},
        world_size=WORLD_SIZE,
        one_rank_of=WORLD_SIZE,
        device=device,
    )
    context = join_process_group(plan, 0, 0)
    on_gpu = context.device.type == "cuda"
    if on_gpu:
        torch.cuda.init()
        torch.cuda.memory._record_memory_history(  # noqa: SLF001
            enabled="all", context=None, max_entries=2_000_000
        )
    sink = _Nobody()
    job = build_job(spec, context, sink)
    for _ in range(STEPS):
        job.run_step(sink)
    snapshot: dict[str, Any] = {"segments": [], "device_traces": []}
    if on_gpu:
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()  # noqa: SLF001
    output.write_bytes(gzip.compress(pickle.dumps(snapshot, protocol=4), 9, mtime=0))


def run(number: int, folder: Path, device: str, *, tiny: bool) -> str:
    """Record one of JOBS in a process of its own; say how it went."""
    spec, conf = JOBS[number]
    output = folder / f"{spec}-{conf.partition(':')[0] or 'default'}.pickle.gz"
    environment = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")}
    if conf:  # torch 2.9 renamed it and still takes the old name
        environment |= {"PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf}
    command = [sys.executable, str(Path(__file__).resolve()), "--record", str(number)]
    command += ["-o", str(output), "--device", device, *(["--tiny"] if tiny else [])]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"FAILED {output.name}: longer than {TIMEOUT_S} s"
    if done.returncode:
        return f"FAILED {output.name}: {done.stderr[-1500:]}"
    size = output.stat().st_size
    return f"{output.name}: {size:,} bytes, {time.monotonic() - begin:.0f} s"


def main() -> int:
    """Record everything; exit status 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model for trying the script itself")
    parser.add_argument("--record", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.record is not None:
        record(JOBS[chosen.record][0], chosen.output, chosen.device, tiny=chosen.tiny)
        return 0
    chosen.output.mkdir(parents=True, exist_ok=True)
    failed = 0
    with ThreadPoolExecutor(chosen.jobs) as pool:
        started = [
            pool.submit(run, number, chosen.output, chosen.device, tiny=chosen.tiny)
            for number in range(len(JOBS))
        ]
        for future in as_completed(started):
            print(future.result(), flush=True)
            failed += future.result().startswith("FAILED")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
