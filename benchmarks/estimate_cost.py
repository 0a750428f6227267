"""What an estimate costs: CPU seconds and resident memory of the dry run, Llama shapes.

    python benchmarks/estimate_cost.py [--model 8b] [--world-size N ...] [-o docs/estimate-cost.md]

One rank of N on FSDP2 with full activation checkpointing and bfloat16 compute, one sequence of 8192
tokens; HSDP: shards of 8 ranks, replicated. Goals: 15 s for 8 B, 30 s for 70 B, 1 GB each. CPU
seconds are those of all processes with torch's import; resident is the sum of what the parent and
the process of the short runs held at most, pages that they share counted twice.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from page import write_table

from fsdp_doctor.gpus_table import find_gpu
from fsdp_doctor.simulator.child import import_dry_run
from fsdp_doctor.simulator.estimate import STEADY_STEPS
from fsdp_doctor.simulator.request import DryRunRequest
from fsdp_doctor.units import format_bytes

MODELS: dict[str, dict[str, int]] = {
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256},
    "70b": {
        "layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256,
    },
}  # fmt: skip


def spec(model: str, world_size: int, *, hybrid: bool) -> dict[str, Any]:
    """Return the spec of a Llama shape."""
    fsdp2: dict[str, Any] = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
    if hybrid:
        fsdp2["mesh"] = {"replicate": world_size // 8, "shard": 8}
    return {
        "name": f"llama-{model}",
        "world_size": world_size,
        "workload": {"model": MODELS[model], "micro_batch": 1, "sequence_length": 8192},
        "config": {
            "strategy": "fsdp2",
            "fsdp2": fsdp2,
            "activation_checkpointing": {"mode": "full"},
        },
    }


def measure(request: DryRunRequest) -> tuple[int, int, float, int]:
    """Return peak allocated and reserved bytes, CPU seconds with imports and of all processes, and
    the resident bytes that they may have held together.
    """
    found = import_dry_run().answer(request).estimate
    assert found is not None
    steady = found.steady
    cpu_s, resident = 0.0, 0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        cpu_s += usage.ru_utime + usage.ru_stime
        resident += usage.ru_maxrss * 1024
    return steady.peak_allocated_bytes, steady.peak_reserved_bytes, cpu_s, resident


def main() -> int:
    """Print one line for each model, mesh and world size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--world-size", action="append", type=int)
    parser.add_argument("--every-layer", action="store_true", help="without the short cut")
    parser.add_argument("-o", "--output", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    lines = [
        "| model | mesh | ranks | peak allocated | reserved | CPU s | resident |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    for model in arguments.model or list(MODELS):
        for hybrid in (False, True):
            for world_size in arguments.world_size or [8, 64, 1024, 16384]:
                request = DryRunRequest(
                    spec=spec(model, world_size, hybrid=hybrid),
                    rank=0,
                    steps=STEADY_STEPS["fsdp2"],
                    workspace_bytes=find_gpu("h200").cublas_workspace_bytes,
                    every_layer=arguments.every_layer,
                )
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    peak, reserved, cpu_s, resident = pool.submit(measure, request).result()
                mesh = "HSDP" if hybrid else "FSDP2"
                sizes = " | ".join(map(format_bytes, (peak, reserved)))
                cost = f"{cpu_s:.1f} | {format_bytes(resident)}"
                lines.append(f"| {model} | {mesh} | {world_size} | {sizes} | {cost} |")
                print(lines[-1], flush=True)
    if arguments.output:
        text = "\n".join(lines) + "\n"
        write_table(arguments.output, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
