"""The short cut over repeated layers against the run of every layer: equal in all they say?

    python benchmarks/estimate_short_cut.py [NAME ...] [-o docs/estimate-short-cut.md]

Each case is estimated twice: from three runs of a few layers, and from one of all. Compared are
both estimates as wholes: allocated, reserved and resident bytes of each phase of the first and the
steady step by category, the largest allocations with their frames, and the counted work. Where
layers do not repeat exactly the short cut must say so, and all layers are run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from page import show

from fsdp_doctor.gpus_table import find_gpu
from fsdp_doctor.model.estimate import RankEstimate
from fsdp_doctor.simulator.estimate import STEADY_STEPS, simulate
from fsdp_doctor.simulator.request import DryRunRequest

LAYERS = {"fsdp2, every 2nd recomputed": 26}
"""What a short cut takes to pay; 16 elsewhere."""
MODEL = {"hidden": 256, "heads": 8, "kv_heads": 4, "vocab": 4096}
POLICY = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
FULL = {"activation_checkpointing": {"mode": "full"}}
ACCUMULATE = {"gradient_accumulation": {"steps": 2, "sync": "last_microbatch"}}
HSDP = {"mesh": {"replicate": 2, "shard": 4}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fsdp2": ("fsdp2", {"mp_policy": POLICY}, {}),
    "fsdp2, keep": ("fsdp2", {"mp_policy": POLICY, "reshard_after_forward": False}, {}),
    "fsdp2, reshard to 2": ("fsdp2", {"mp_policy": POLICY, "reshard_after_forward": 2}, {}),
    "fsdp2, HSDP, checkpointing": ("fsdp2", {"mp_policy": POLICY, **HSDP}, FULL),
    "fsdp2, every 2nd recomputed": (
        "fsdp2",
        {"mp_policy": POLICY, "blocks_per_unit": 1},
        {"activation_checkpointing": {"mode": "every_n", "every_n": 2}},
    ),
    "fsdp2, selective, clipping": (
        "fsdp2",
        {"mp_policy": POLICY},
        {"activation_checkpointing": {"mode": "selective"}, "optimizer": {"max_grad_norm": 1.0}},
    ),
    "fsdp2, accumulation": ("fsdp2", {"mp_policy": POLICY}, ACCUMULATE),
    "fsdp2, offload": ("fsdp2", {"mp_policy": POLICY, "offload_policy": {}}, {}),
    "fsdp2, fused": ("fsdp2", {}, {"optimizer": {"implementation": "fused"}}),
    "fsdp1": ("fsdp1", {"mixed_precision": POLICY}, {}),
    "fsdp1, gradients, checkpointing": (
        "fsdp1",
        {"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": POLICY},
        FULL,
    ),
    "fsdp1, HSDP, accumulation": (
        "fsdp1",
        {"sharding_strategy": "HYBRID_SHARD", "mixed_precision": POLICY, **HSDP},
        ACCUMULATE,
    ),
    "ddp": ("ddp", {}, {"precision": {"autocast": "bfloat16"}}),
}
"""Name -> strategy, its section, other sections of the config."""


def estimates(name: str) -> Iterator[tuple[RankEstimate, float]]:
    """Yield the estimate by the short cut and that of every layer, each with its seconds."""
    strategy, section, others = CASES[name]
    model = MODEL | {"layers": LAYERS.get(name, 16)}
    raw = {
        "name": "short-cut",
        "world_size": 8,
        "workload": {"model": model, "micro_batch": 2, "sequence_length": 256},
        "config": {"strategy": strategy, strategy: section, **others},
    }
    for every_layer in (False, True):
        begin = time.monotonic()
        found = simulate(
            DryRunRequest(
                spec=raw,
                rank=0,
                steps=STEADY_STEPS[strategy],
                workspace_bytes=find_gpu("h200").cublas_workspace_bytes,
                every_layer=every_layer,
            )
        )
        yield found, time.monotonic() - begin


def _comparable(estimate: RankEstimate) -> RankEstimate:
    """Leave out how it was come by, and the order in which work was counted."""
    work = estimate.work
    assert work is not None
    ordered = replace(
        work,
        kernels=tuple(sorted(work.kernels, key=repr)),
        collectives=tuple(sorted(work.collectives, key=repr)),
        copies=tuple(sorted(work.copies, key=repr)),
    )
    return replace(estimate, layers=None, work=ordered)


def differences(a: RankEstimate, b: RankEstimate) -> list[str]:
    """Return the paths at which two estimates differ."""
    return list(_differences(msgspec.to_builtins(a), msgspec.to_builtins(b), ""))


def _differences(a: Any, b: Any, path: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a | b:
            yield from _differences(a.get(key), b.get(key), f"{path}.{key}")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _differences(x, y, f"{path}[{index}]")
    elif a != b:
        yield f"{path}: {a} {b}"


def main() -> int:
    """Print one line for each case; exit with 1 when one differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("-o", "--output", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    lines = ["| one of 8 ranks | layers | differences |", "|---|---|--:|"]
    wrong = 0
    for name in arguments.names or CASES:
        (short, short_s), (full, full_s) = estimates(name)
        found = differences(_comparable(short), _comparable(full))
        wrong += bool(found)
        lines.append(f"| {name} | {short.layers} | {len(found)} |")
        print(f"{lines[-1]} {short_s:.1f} s, {full_s:.1f} s", file=sys.stderr, flush=True)
        for text in found[:8]:
            print(f"    {text[:200]}", file=sys.stderr)
    text = "\n".join(lines) + "\n"
    show(text, arguments.output)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
