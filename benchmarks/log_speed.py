"""How fast logs are read: MB per CPU second and peak memory, against plain iteration of the lines.

    python benchmarks/log_speed.py [--mb 400] [--ranks 64]

Writes logs of many ranks into a temporary folder: half of the lines are iteration lines of
Megatron-LM, some memory lines, the rest noise; the last rank ends in an out of memory. All
iteration and memory lines must be in the history. Goal: 100 MB/s per core or better, and memory
bounded by the history kept, not by the size of the logs.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from fsdp_doctor.logs.scan import scan_logs
from fsdp_doctor.logs.sources import find_logs

ITERATION = (
    " [2026-08-22 10:00:00.123456] iteration {i:8d}/  500000 | consumed samples: {n:12d} | elapsed "
    "time per iteration (ms): {t:.1f} | throughput per GPU (TFLOP/s/GPU): 410.2 | learning rate: "
    "3.000000E-06 | global batch size:  1024 | lm loss: 2.345678E+00 | loss scale: "
    "1.0 | grad norm: "
    "0.123 | num zeros: 0 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
MEMORY = (
    "[Rank {r}] (after {i} iterations) memory (MB) | allocated: 10240.50 | max "
    "allocated: 15360.25 | "
    "reserved: 16000.00 | max reserved: 16000.00\n"
)
NOISE = (
    "2026-08-22 10:00:00 INFO loader worker {w} fetched shard /data/shards/{i:08d}.tar with 1024 "
    "samples in 0.234 seconds and cache size 12\n"
)
OOM = (
    "[rank{r}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 "
    "GiB. GPU 0 has a "
    "total capacity of 79.25 GiB of which 8.94 MiB is free.\n"
)


def write_logs(folder: Path, megabytes: int, ranks: int) -> tuple[int, int]:
    """Write the logs; return their bytes and the iteration and memory lines in them."""
    size = lines = 0
    per_rank = megabytes * 1_000_000 // ranks
    for rank in range(ranks):
        path = folder / f"rank_{rank}.log"
        with path.open("w", encoding="utf-8") as file:
            written = step = 0
            while written < per_rank:
                step += 1
                text = ITERATION.format(i=step, n=step * 1024, t=500 + step % 9)
                lines += 1
                if step % 10 == 0:
                    text += MEMORY.format(r=rank, i=step)
                    lines += 1
                else:
                    text += NOISE.format(w=step % 8, i=step)
                written += file.write(text)
            if rank == ranks - 1:
                written += file.write(OOM.format(r=rank))
            size += written
    return size, lines


def plain_iteration(paths: list[Path]) -> float:
    """Return the CPU seconds of reading all lines and doing nothing."""
    start = time.process_time()
    for path in paths:
        with path.open("rb") as file:
            for _ in file:
                pass
    return time.process_time() - start


def peak_mib() -> float:
    """Return the largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    """Write, read, and print MB/s beside the floor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size, lines = write_logs(folder, options.mb, options.ranks)
        floor = plain_iteration(sorted(folder.iterdir()))
        before = peak_mib()
        start = time.process_time()
        result = scan_logs(find_logs([folder])[0])
        seconds = time.process_time() - start
    kept = sum(
        24 * len(one.memory_steps) + 8 * len(one.memory_steps) + 16 * len(one.time_steps)
        for one in result.history.ranks.values()
    )
    print(
        f"logs                {size / 1e6:8.0f} MB in {options.ranks} files, {result.lines:,} lines"
    )
    known = result.history.lines
    print(f"in the history      {known:8,} of {lines:,} iteration and memory lines")
    print(f"failures            {len(result.failures):8}")
    print(f"plain iteration     {size / 1e6 / floor:8.0f} MB/s CPU")
    times = f"{seconds / floor:5.1f} x the floor"
    print(f"fsdp-doctor         {size / 1e6 / seconds:8.0f} MB/s CPU  {times}")
    more = peak_mib() - before
    print(f"memory              {more:8.0f} MiB more, {kept / 2**20:.0f} MiB of them history")
    return 0 if result.history.lines == lines and len(result.failures) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
