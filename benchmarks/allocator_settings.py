"""The allocator model under other settings against a real GPU's allocator. Needs a CUDA device.

    python benchmarks/allocator_settings.py SPEC [--world-size N] [-o TABLE.md]

The allocations of a spec's dry run are made again on the GPU, empty tensors of the same sizes on as
many streams in the same order, in a process for each setting of PYTORCH_CUDA_ALLOC_CONF. Peak and
last reserved bytes, segments and retries are set beside the model's. Where a setting acts only
under a limit (``garbage_collection_threshold``), ``set_per_process_memory_fraction`` sets one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_doctor.config.spec import load_written_spec
from fsdp_doctor.memory.allocator_conf import parse_alloc_conf
from fsdp_doctor.memory.caching_allocator import Block, CachingAllocator, OutOfMemoryModelled

SETTINGS: tuple[tuple[str, float], ...] = (
    ("", 1.0),
    ("expandable_segments:True", 1.0),
    ("max_split_size_mb:32", 1.0),
    ("max_split_size_mb:128", 1.0),
    ("max_split_size_mb:512", 1.0),
    ("roundup_power2_divisions:4", 1.0),
    ("roundup_power2_divisions:16", 1.0),
    ("garbage_collection_threshold:0.6", 0.25),
    ("garbage_collection_threshold:0.8,max_split_size_mb:128", 0.25),
)
"""Setting, and the part of the GPU's memory that the process may take."""
_OUT_OF_MEMORY = "out of memory"

Event = tuple[int, int, int]
"""(id, bytes, stream); 0 bytes: the block is freed."""


@dataclass(slots=True)
class Result:
    """What an allocator held."""

    peak: int = 0
    last: int = 0
    segments: int = 0
    retries: int = 0
    end: str = "done"


def model(events: list[Event], conf: str, capacity: int | None) -> Result:
    """Play the events through the model."""
    settings = replace(parse_alloc_conf(conf), capacity_bytes=capacity)
    allocator, live, result = CachingAllocator(settings), {}, Result()
    blocks: dict[int, Block] = live
    try:
        for index, size, stream in events:
            if size:
                blocks[index] = allocator.allocate(size, stream)
                result.peak = max(result.peak, allocator.reserved_bytes)
            else:
                allocator.free(blocks.pop(index))
    except OutOfMemoryModelled:
        result.end = _OUT_OF_MEMORY
    result.last, result.segments = allocator.reserved_bytes, allocator.segment_allocations
    result.retries = allocator.retries
    return result


def play_on_gpu(events: list[Event], fraction: float) -> dict[str, Any]:
    """Make and drop tensors in this process; return what torch counted."""
    import torch

    if fraction < 1:
        torch.cuda.set_per_process_memory_fraction(fraction)
    streams = {0: torch.cuda.current_stream()}
    live: dict[int, torch.Tensor] = {}
    end = "done"
    try:
        for index, size, stream in events:
            if size:
                with torch.cuda.stream(streams.setdefault(stream, torch.cuda.Stream())):
                    live[index] = torch.empty(size, dtype=torch.uint8, device="cuda")
            else:
                del live[index]
    except torch.cuda.OutOfMemoryError:
        end = _OUT_OF_MEMORY
    stats = torch.cuda.memory_stats()
    return {
        "peak": stats["reserved_bytes.all.peak"],
        "last": stats["reserved_bytes.all.current"],
        "segments": stats["segment.all.allocated"],
        "retries": stats["num_alloc_retries"],
        "end": end,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "total": torch.cuda.get_device_properties(0).total_memory,
    }


def simulated_events(spec: Path, world_size: int | None) -> list[Event]:
    """Run the spec's dry run here and return its allocations and frees. Patches torch."""
    from fsdp_doctor.gpus_table import find_gpu
    from fsdp_doctor.simulator.dry_run import dry_run
    from fsdp_doctor.simulator.estimate import STEADY_STEPS, with_world_size

    loaded = with_world_size(load_written_spec(spec, ()).spec, world_size)
    log = dry_run(
        loaded,
        rank=0,
        world_size=loaded.world_size,
        steps=STEADY_STEPS[loaded.config.strategy],
        workspace_bytes=find_gpu("h200").cublas_workspace_bytes,
    ).log
    found: list[Event] = []
    for event in log.events:
        block = log.allocations[abs(event) - 1]
        found.append((block.id, block.requested_bytes if event > 0 else 0, block.stream))
    return found


def child(arguments: list[str], conf: str = "") -> str:
    """Run this file again and return the last line that it prints."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": conf},
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} under {conf!r}:\n{done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1]


def row(conf: str, fraction: float, real: dict[str, Any], modelled: Result) -> str:
    """One line of the table."""
    error = modelled.peak / real["peak"] - 1
    setting = f"{conf or 'as torch is'}" + (f", {fraction:.0%} of the GPU" if fraction < 1 else "")
    cells = [setting, f"{real['peak']:,}", f"{modelled.peak - real['peak']:+,} ({error:+.2%})"]
    cells += [f"{modelled.last - real['last']:+,}", f"{real['segments']}, {modelled.segments}"]
    cells += [f"{real['retries']}, {modelled.retries}", f"{real['end']}, {modelled.end}"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Print the table, or be one of the child processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("spec", type=Path)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--events", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--play", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.play is not None:
        events = [tuple(event) for event in json.loads(arguments.events.read_text())]
        print(json.dumps(play_on_gpu(events, arguments.play)))
        return 0
    if arguments.events is not None:
        events = simulated_events(arguments.spec, arguments.world_size)
        arguments.events.write_text(json.dumps(events))
        print(len(events))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.json"
        common = [str(arguments.spec), "--events", str(path)]
        size = ["--world-size", str(arguments.world_size)] if arguments.world_size else []
        print(f"{child([*common, *size])} events", file=sys.stderr)
        events = [tuple(event) for event in json.loads(path.read_text())]
        lines = [
            "| setting | peak reserved | model's | last: model's | segments | retries | end |",
            "|---|--:|--:|--:|--:|--:|---|",
        ]
        for conf, fraction in SETTINGS:
            real = json.loads(child([*common, "--play", str(fraction)], conf))
            capacity = int(real["total"] * fraction) if fraction < 1 else None
            lines.append(row(conf, fraction, real, model(events, conf, capacity)))
            print(lines[-1], file=sys.stderr, flush=True)
    text = f"{real['device']}, torch {real['torch']}\n\n" + "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
