"""CPU time and memory of a snapshot's full analysis, against ``torch.cuda._memory_viz``.

    python benchmarks/snapshot_speed.py [--events N] [--frames N]

One generated file of N trace events (default a million); ``trace_plot`` and ``analyse_snapshot``
(replay, categories, growth, free memory, findings) read it in turn, each in a fresh process. Goal:
at most a fifth of the CPU time and half of the memory. The memory of the analysis is that of its
two processes together. Needs torch only for the peer.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OURS = """
import resource, sys
from pathlib import Path
from fsdp_doctor.memory.snapshot_analysis import analyse_snapshot
found = analyse_snapshot(Path(sys.argv[1]))
own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(own + child, found.events, len(found.steps), found.peak.allocated_bytes)
"""
PEER = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
START_US = 1_750_000_000_000_000
LAYERS, BLOCKS = 24, 10


def generate(path: Path, events: int, depth: int) -> int:
    """Write a snapshot of a training loop; frames are shared objects, as torch writes them."""
    chance = random.Random(3)  # noqa: S311 (no secret)
    pool = [
        {"name": f"call_{i}", "filename": f"/opt/lib/python3/site-packages/torch/nn/m{i % 40}.py",
         "line": 10 + i}
        for i in range(400)
    ]  # fmt: skip
    stacks = [[chance.choice(pool) for _ in range(depth)] for _ in range(LAYERS * BLOCKS)]
    trace: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    segment = {"device": 0, "address": 1 << 40, "total_size": 1 << 36, "allocated_size": 0,
               "active_size": 0, "requested_size": 0, "stream": 0, "segment_type": "large",
               "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": [
                   {"address": 1 << 40, "size": 1 << 36, "requested_size": 0,
                    "state": "inactive", "frames": []}]}  # fmt: skip

    def event(action: str, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        trace.append({"action": action, "addr": address, "size": size, "stream": 0,
                      "time_us": START_US + len(trace) * 7, "compile_context": "N/A",
                      "user_metadata": "", "pool_id": (0, 0), "frames": frames})  # fmt: skip

    def note(name: str, stage: str) -> None:
        time_us = START_US + len(trace) * 7
        notes.append({"name": name, "stage": stage, "device": 0, "time_us": time_us})

    while len(trace) < events:
        note("DistributedDataParallel.forward", "START")
        live = []
        for index, stack in enumerate(stacks):
            size = chance.randrange(1 << 20, 64 << 20)
            address = (1 << 40) + index * (64 << 20)
            event("alloc", address, size, list(stack))
            live.append((address, size, stack))
        note("backward", "START")
        for address, size, stack in reversed(live):
            frames = list(stack)
            event("free_requested", address, size, frames)
            event("free_completed", address, size, frames)
        note("Optimizer.step#AdamW.step", "START")
        note("Optimizer.step#AdamW.step", "END")
    snapshot = {"segments": [segment], "device_traces": [trace], "allocator_settings": {},
                "external_annotations": notes}  # fmt: skip
    with path.open("wb") as file:
        pickle.dump(snapshot, file, protocol=4)
    return len(trace)


def measure(command: list[str]) -> tuple[float, str]:
    """Return CPU seconds (with children) and the output of a process."""
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = os.times()
    spent = after.children_user + after.children_system
    return spent - before.children_user - before.children_system, done.stdout


def main() -> int:
    """Generate, measure both, print the ratios."""
    if sys.argv[1:2] == ["--write"]:
        count = generate(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        print(f"{count:,} events,", end=" ", flush=True)
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--frames", type=int, default=57, help="frames of a stack")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pickle"
        sizes = [str(arguments.events), str(arguments.frames)]
        # a process of its own: a child starts with its parent's peak memory as its own
        subprocess.run([sys.executable, __file__, "--write", str(path), *sizes], check=True)
        print(f"{path.stat().st_size / 1e6:.0f} MB")
        ours_s, printed = measure([sys.executable, "-c", OURS, str(path)])
        ours_mib = int(printed.split()[0]) / 1024
        plot = str(Path(folder) / "plot.html")
        viz = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", plot]
        peer_s, printed = measure([sys.executable, "-c", PEER, *viz])
        peer_mib = int(printed.split()[-1]) / 1024
    print(f"trace_plot        {peer_s:6.2f} s CPU  {peer_mib:6.0f} MiB")
    print(f"analyse_snapshot  {ours_s:6.2f} s CPU  {ours_mib:6.0f} MiB (both processes)")
    print(f"ratio             {peer_s / ours_s:6.2f} x CPU  {ours_mib / peer_mib:6.2f} of memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
