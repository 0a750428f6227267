"""One rank of a profiled job. ``python -m fsdp_doctor.profiler.worker PLAN`` under torchrun.

The process that torchrun starts forks the rank proper before torch is imported, waits, and writes
down how it ended: a rank killed by a signal cannot say so itself.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_doctor.profiler.plan import LaunchPlan, read_plan
from fsdp_doctor.profiler.ranks import RankProcesses, die_with_parent
from fsdp_doctor.runs.heartbeat import HeartbeatWriter

if TYPE_CHECKING:
    import torch

    from fsdp_doctor.training.strategies import RankContext

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""The supervisor's phase limits are shorter; this is the last resort."""


def stack_path(directory: Path, rank: int) -> Path:
    """Return the file into which a rank dumps its stacks on SIGUSR1."""
    return directory / f"rank-{rank:05d}.stack"


def run_rank(plan: LaunchPlan, rank: int, local_rank: int) -> int:
    """Run the whole job of one rank in this process; return its exit status."""
    directory = Path(plan.run_directory)
    with stack_path(directory, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        heartbeat = HeartbeatWriter(directory, rank)
        heartbeat.beat(-1, "load")
        heartbeat.close()
        from fsdp_doctor.profiler.rank_job import train

        return train(plan, rank, local_rank)


def choose_device(plan: LaunchPlan, local_rank: int, local_ranks: int) -> torch.device:
    """Return this rank's device: a GPU of its own where there is one for every local rank."""
    import torch

    gpus = torch.cuda.device_count() if plan.device != "cpu" else 0
    if plan.device == "cuda" or (plan.device == "auto" and gpus >= local_ranks):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def join_process_group(plan: LaunchPlan, rank: int, local_rank: int) -> RankContext:
    """Join the real process group (torchrun's environment) or the fake one."""
    import torch
    import torch.distributed as dist

    from fsdp_doctor.training.strategies import RankContext

    local_ranks = 1 if plan.one_rank_of else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = choose_device(plan, 0 if plan.one_rank_of else local_rank, local_ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if plan.memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(plan.memory_fraction, device)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
    options: dict[str, Any] = {"timeout": COLLECTIVE_TIMEOUT}
    if plan.one_rank_of:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # torch 2.6 - 2.14

        options.update(store=FakeStore(), rank=rank, world_size=plan.one_rank_of)
        dist.init_process_group("fake", **options)
    else:
        if device.type == "cuda":
            options["device_id"] = device
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
    return RankContext(
        rank=rank,
        local_rank=local_rank,
        world_size=dist.get_world_size(),
        device=device,
        fake=plan.one_rank_of is not None,
    )


def main(arguments: list[str]) -> int:
    """Fork the rank that torchrun's environment names, and wait for it."""
    die_with_parent()
    plan = read_plan(Path(arguments[0]))
    rank = int(os.environ["RANK"])
    local_rank = int(os.environ["LOCAL_RANK"])
    ranks = RankProcesses(Path(plan.run_directory))
    ranks.start(rank, lambda: run_rank(plan, rank, local_rank))

    def stop(number: int, _frame: object) -> None:
        ranks.stop()
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return ranks.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
