"""What an estimate costs: CPU seconds and resident memory of the dry run, Llama shapes.

    python benchmarks/estimate_cost.py [--model 8b] [--model 70b] [--world-size N ...]

One rank of N on FSDP2 with full activation checkpointing and bfloat16 compute, one sequence of 8192
tokens; with ``--hybrid`` shards of 8 ranks, replicated. Goals: 15 s and 30 s, 1 GB each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from typing import Any

from fsdp_doctor.gpus_table import find_gpu
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
    """Return peak allocated and reserved bytes, CPU seconds with imports, resident bytes."""
    from fsdp_doctor.simulator.dry_run import answer

    found = answer(request).estimate
    assert found is not None
    steady = found.steady
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return steady.peak_allocated_bytes, steady.peak_reserved_bytes, time.process_time(), resident


def main() -> int:
    """Print one line for each model and world size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--world-size", action="append", type=int)
    parser.add_argument("--hybrid", action="store_true", help="shards of 8 ranks, replicated")
    arguments = parser.parse_args()
    print("model | ranks | peak allocated | reserved | CPU s | resident")
    for model in arguments.model or list(MODELS):
        for world_size in arguments.world_size or [8, 64, 1024, 16384]:
            request = DryRunRequest(
                spec=spec(model, world_size, hybrid=arguments.hybrid),
                rank=0,
                steps=STEADY_STEPS["fsdp2"],
                workspace_bytes=find_gpu("h200").cublas_workspace_bytes,
            )
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                peak, reserved, cpu_s, resident = pool.apply(measure, (request,))
            sizes = f"{format_bytes(peak)} | {format_bytes(reserved)}"
            line = f"{model} | {world_size} | {sizes} | {cpu_s:.1f} | {format_bytes(resident)}"
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
