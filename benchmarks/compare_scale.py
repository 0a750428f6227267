"""How long ``compare`` takes on large runs, and how much memory, against reading their bytes.

    python benchmarks/compare_scale.py [--ranks 512] [--steps 1000] [--directory DIR] [--keep]

Writes two synthetic runs with the store's own writer (four phases, memory and times of every step,
times one step late, an anatomy; B holds more activations and is 2 % slower, one rank of it lags),
then runs ``compare A B`` in a process of its own and prints its wall time and peak memory (the
largest process, and all of them); as the writer left the runs, and without the columns that it
keeps beside the lines of a rank, as of runs that were killed. The floor, measured in the same run:
decoding every line into plain objects with ``msgspec`` and with ``json`` (the latter on a sixteenth
of the files, scaled), and reading the bytes alone, in CPU seconds, which a busy machine changes
least. Goal for 512 x 1,000: under 10 s and 2 GB on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from fsdp_doctor.model.run import RunManifest
from fsdp_doctor.runs import SCHEMA, RankWriter, write_manifest

GIB = 1 << 30
PHASES = ("data", "forward", "backward", "optimizer")
SHARES = (0.02, 0.33, 0.55, 0.1)
LATE_SHARES = (0.02, 0.33, 0.5, 0.15)
"""A rank whose own work takes 5 % of the step longer; it waits so much less for the others."""


def write_run(directory: Path, ranks: int, steps: int, *, activations: int, slower: float) -> None:
    """Write a run; ``slower`` is a factor of all times."""
    directory.mkdir(parents=True)
    manifest = RunManifest(
        schema=SCHEMA,
        name=directory.name,
        tool_version="0",
        created="2026-01-01T00:00:00+00:00",
        status="completed",
        source="real_ranks",
        world_size=ranks,
        ranks=tuple(range(ranks)),
        device_type="cuda",
        device_name="synthetic",
        environment={"torch": "0"},
        tokens_per_step=ranks * 4096,
    )
    write_manifest(directory, manifest)
    rng = np.random.default_rng(1)
    level = 0.4 * slower * np.exp(rng.normal(0, 0.01, steps))
    for rank in range(ranks):
        late = slower > 1 and rank == ranks // 2
        times = level * np.exp(rng.normal(0, 0.003, steps))
        shares = LATE_SHARES if late else SHARES
        _write_rank(RankWriter(directory, rank), rank, times, shares, activations)


def _write_rank(
    writer: RankWriter,
    rank: int,
    times: np.ndarray,
    shares: tuple[float, ...],
    activations: int,
) -> None:
    base = 20 * GIB + 512 * rank
    peaks = {
        "data": base,
        "forward": base + activations,
        "backward": base + activations + 2 * GIB,
        "optimizer": base + 3 * GIB,
    }
    writer.write("start", {"local_rank": rank % 8, "host": f"node{rank // 8}", "pid": 1 + rank})
    for phase in ("init", "wrap"):
        writer.write("phase", {"step": -1, "phase": phase, **_memory(base, base)})
    for number, seconds in enumerate(times.tolist()):
        kind = "observed" if number < 3 else "warmup" if number < 8 else "timed"
        writer.write("begin", {"step": number, "kind": kind, "gap_s": 1e-4})
        for phase in PHASES:
            memory = _memory(peaks[phase] + 512 * (number % 3), base)
            writer.write("phase", {"step": number, "phase": phase, "microbatch": 0, **memory})
        used = base + 30 * GIB if number % 10 == 0 else None
        counts = {"allocation_retries": 0, "out_of_memory_count": 0, "device_used_bytes": used}
        host = {"host_rss_bytes": 5 * GIB}
        writer.write("step", {"step": number, "kind": kind, **counts, **host})
        parts = [[p, 0, s * seconds] for p, s in zip(PHASES, shares, strict=True)]
        loss = {"loss": 2.5, "loss_finite": True}
        writer.write("times", {"step": number, "step_time_s": seconds, "phases": parts, **loss})
    categories = {p: {"parameters": base, "activations": peaks[p] - base} for p in PHASES}
    anatomy = {
        "step": 2,
        "source": "cuda_history",
        "peak_phase": "backward",
        "peak_allocated_bytes": peaks["backward"],
        "categories": categories["backward"],
        "phases": {
            p: {
                "peak_allocated_bytes": peaks[p],
                "end_allocated_bytes": base,
                "categories": categories[p],
            }
            for p in PHASES
        },
        "resident": {"parameters": base},
    }
    writer.write("anatomy", anatomy)
    writer.write("end", {"time": 0.0})
    writer.write("exit", {"exit_code": 0})
    writer.close()


def _memory(peak: int, end: int) -> dict[str, dict[str, int]]:
    def counters(size: int) -> dict[str, int]:
        return {
            "allocated_bytes": size,
            "reserved_bytes": size + GIB,
            "active_bytes": size,
            "requested_bytes": size - 100,
        }

    return {"end": counters(end), "peak": counters(peak)}


class Watched:
    """Runs a command; keeps the largest memory of one of its processes and of all together."""

    def __init__(self, command: list[str]) -> None:
        self.largest = self.together = 0
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        watcher = threading.Thread(target=self._watch, args=(process,), daemon=True)
        watcher.start()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.output = process.communicate()[0]
        self.seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.status = process.returncode
        watcher.join()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            sizes = [_private(pid) for pid in (process.pid, *_children(process.pid))]
            self.largest = max(self.largest, *sizes)
            self.together = max(self.together, sum(sizes))
            time.sleep(0.05)


def _children(pid: int) -> list[int]:
    try:
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _private(pid: int) -> int:
    """Return a process's resident memory, pages that it shares counted in part (PSS)."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(text.partition("\nPss:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def floors(directories: list[Path]) -> dict[str, float]:
    """Return seconds on one core to read all bytes, and to decode all lines."""
    files = [file for d in directories for file in sorted(d.glob("*.jsonl"))]
    start = time.process_time()
    for file in files:
        file.read_bytes()
    read = time.process_time() - start
    decoder = msgspec.json.Decoder()
    start = time.process_time()
    for file in files:
        for line in file.read_bytes().splitlines():
            decoder.decode(line)
    decode = time.process_time() - start
    part = files[::16]
    start = time.process_time()
    for file in part:
        for line in file.read_bytes().splitlines():
            json.loads(line)
    plain = (time.process_time() - start) * len(files) / len(part)
    return {"bytes read": read, "msgspec, every line": decode, "json.loads, every line": plain}


@contextmanager
def _aside(directories: list[Path]) -> Iterator[None]:
    """Move the kept columns away, and back."""
    kept = [file for d in directories for file in d.glob("*.columns")]
    for file in kept:
        file.rename(file.with_suffix(".aside"))
    yield
    for file in kept:
        file.with_suffix(".aside").rename(file)


def main() -> int:
    """Write, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--keep", action="store_true", help="Keep the runs, and use those there.")
    options = parser.parse_args()
    directory = options.directory or Path(tempfile.mkdtemp(prefix="compare-scale-"))
    sides = [directory / "a", directory / "b"]
    try:
        for side, more, slower in ((sides[0], 0, 1.0), (sides[1], GIB, 1.02)):
            if not side.exists():
                size = 10 * GIB + more
                write_run(side, options.ranks, options.steps, activations=size, slower=slower)
        size = sum(f.stat().st_size for side in sides for f in side.glob("*.jsonl"))
        cores = len(os.sched_getaffinity(0))
        print(f"2 runs x {options.ranks} ranks x {options.steps} steps: {size / 1e6:,.0f} MB")
        program = [sys.executable, "-m", "fsdp_doctor", "compare", *map(str, sides), "--json"]
        with _aside(sides):
            parsed = Watched(program)
        done = Watched(program)
        told = Watched(program[:-1])
        payload = json.loads(done.output)
        found = {m["name"]: m for m in reversed(payload["metrics"]) if m["rank"] is None}
        for what, one in (
            ("compare --json", done),
            ("compare, to the terminal", told),
            ("compare --json, every line parsed", parsed),
        ):
            print(
                f"{what}: {one.seconds:.1f} s on {cores} cores ({one.cpu_s:.1f} s of CPU), "
                f"{one.together / 1e6:,.0f} MB in all processes, {one.largest / 1e6:,.0f} MB in one"
            )
        print(f"{len(payload['metrics']):,} metrics, {len(payload['findings'])} findings")
        peak = found["peak_allocated_bytes"]["delta"]
        late = [f["claim"] for f in payload["findings"] if f["cause"] == "straggler"]
        right = peak == GIB and len(late) == 1 and f"rank {options.ranks // 2} " in late[0]
        right = right and payload == json.loads(parsed.output)
        print(f"answer: peak {peak:+,} bytes; {'; '.join(late)}: {'right' if right else 'WRONG'}")
        for name, seconds in floors(sides).items():
            ratio = done.cpu_s / seconds
            print(f"floor, CPU, {name}: {seconds:.1f} s (compare takes {ratio:.2f} of it)")
        return 0 if right and done.status == 0 else 1
    finally:
        if not options.keep and options.directory is None:
            shutil.rmtree(directory)


if __name__ == "__main__":
    raise SystemExit(main())
