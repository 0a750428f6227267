"""Run many short launches on one machine without paying torch's import each time.

``python -m fsdp_doctor.profiler.forkserver`` imports torch once (no CUDA context, no process
group), then reads plan paths from standard input, one a line; for each it forks fresh rank
processes, waits for them and prints their exit code. An empty torchrun costs seconds, a fork a
tenth of one.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from fsdp_doctor.profiler.plan import LaunchPlan, read_plan
from fsdp_doctor.profiler.ranks import RankProcesses, die_with_parent
from fsdp_doctor.profiler.worker import run_rank

LOG_NAME = "launch.log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _rank_main(plan: LaunchPlan, rank: int, local_rank: int, port: int) -> int:
    log = os.open(Path(plan.run_directory) / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(plan.world_size),
        LOCAL_WORLD_SIZE=str(len(plan.ranks)),
    )
    return run_rank(plan, rank, local_rank)


def run_launch(plan: LaunchPlan) -> int:
    """Fork the ranks of one launch and wait; return the first non-zero exit code, or 0."""
    port = _free_port()
    ranks = RankProcesses(Path(plan.run_directory))
    for local_rank, rank in enumerate(plan.ranks):

        def run(rank: int = rank, local_rank: int = local_rank) -> int:
            return _rank_main(plan, rank, local_rank, port)

        ranks.start(rank, run)

    def stop(number: int, _frame: object) -> None:
        ranks.stop()
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, stop)
    try:
        return ranks.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _knows_the_driver() -> bool:
    """Return whether CUDA's driver library is loaded: a fork of a process that used it is useless.

    (``cuInit`` before a fork makes every CUDA call of the child fail.)
    """
    try:
        return "libcuda.so" in Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return False


def _import_once(arguments: list[str]) -> None:
    """Import what every rank needs, so that no fork has to.

    The first optimizer or ``fully_shard`` imports ``torch._dynamo``. Should that load the driver,
    this process starts again and leaves it to the ranks.
    """
    import fsdp_doctor.profiler.rank_job  # noqa: F401 (imported once, for all forks)

    if arguments or _knows_the_driver():
        return
    import torch._dynamo  # noqa: F401 (as above)

    if _knows_the_driver():
        module = "fsdp_doctor.profiler.forkserver"
        os.execv(sys.executable, [sys.executable, "-m", module, "without-dynamo"])  # noqa: S606


def main() -> int:
    """Serve launches until standard input closes."""
    die_with_parent()
    _import_once(sys.argv[1:])
    for line in sys.stdin:
        code = run_launch(read_plan(Path(line.strip())))
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
