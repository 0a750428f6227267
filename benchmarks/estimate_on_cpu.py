"""Predicted against measured memory on CPUs: two gloo ranks with real tensors, by category.

    python benchmarks/estimate_on_cpu.py [NAME ...] [-o docs/estimate-on-cpu.md]

Each spec is profiled by two processes, whose tracker counts every storage, and simulated as a job
on CPUs (no rounding to blocks, no scratch of CUDA kernels). Compared are peak and categories of
each phase of a steady step on rank 0, and what is resident after it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from page import show

from fsdp_doctor.config.spec import load_written_spec
from fsdp_doctor.model.estimate import StepEstimate
from fsdp_doctor.model.memory import Anatomy
from fsdp_doctor.runs import load_run
from fsdp_doctor.simulator.many import Simulations

POLICY = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
CASES: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2", "fsdp2": {"mp_policy": POLICY}},
    "ddp": {"strategy": "ddp"},
    "fsdp1": {"strategy": "fsdp1"},
    "fsdp2, keep, checkpointing": {
        "strategy": "fsdp2",
        "fsdp2": {"reshard_after_forward": False},
        "activation_checkpointing": {"mode": "full"},
    },
    "fsdp2, accumulation, foreach": {
        "strategy": "fsdp2",
        "gradient_accumulation": {"steps": 2, "sync": "last_microbatch"},
        "optimizer": {"implementation": "foreach"},
    },
}
PHASES = ("forward", "backward", "optimizer")


def spec_text(name: str) -> str:
    """A small spec."""
    model = {"layers": 3, "hidden": 128, "heads": 4, "kv_heads": 2, "vocab": 512}
    raw = {
        "name": "on-cpu",
        "world_size": 2,
        "workload": {"model": model, "micro_batch": 2, "sequence_length": 64},
        "config": CASES[name],
        "steps": {"warmup": 3, "timed": 2},
    }
    return yaml.safe_dump(raw)


def measure(spec: Path, folder: Path) -> Anatomy:
    """Profile with two processes; return the anatomy of rank 0."""
    command = [sys.executable, "-m", "fsdp_doctor", "profile", str(spec), "-o", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    anatomy = load_run(folder).ranks[0].anatomy
    assert anatomy is not None
    return anatomy


def differences(predicted: StepEstimate, measured: Anatomy) -> Iterator[tuple[str, str, int, int]]:
    """Yield place, category, predicted and measured bytes, for every category of either."""
    pairs = [(p, predicted.phases[p].categories, measured.phases[p].categories) for p in PHASES]
    pairs.append(("between steps", predicted.resident, measured.resident))
    for place, a, b in pairs:
        for category in sorted(a | b):
            yield place, category, a.get(category, 0), b.get(category, 0)


def main() -> int:
    """Print one line for each phase of each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("-o", "--output", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    lines = ["| case | where | measured | equal categories | predicted less measured |"]
    lines.append("|---|---|--:|--:|---|")
    with tempfile.TemporaryDirectory() as folder, Simulations() as simulations:
        for number, name in enumerate(arguments.names or CASES):
            path = Path(folder) / f"{number}.yaml"
            path.write_text(spec_text(name), encoding="utf-8")
            measured = measure(path, Path(folder) / f"run-{number}")
            spec = load_written_spec(path, ()).spec
            found = simulations.ask(spec, rank=0, device="cpu", workspace_bytes=0)
            if isinstance(found, str):
                raise SystemExit(found)
            lines += rows(name, list(differences(found.steady, measured)))
            print("\n".join(lines[-4:]), file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    show(text, arguments.output)
    return 0


def rows(name: str, found: list[tuple[str, str, int, int]]) -> Iterator[str]:
    """One line for each phase."""
    for place in dict.fromkeys(item[0] for item in found):
        here = [item[1:] for item in found if item[0] == place]
        off = [f"{category} {a - b:+,}" for category, a, b in here if a != b]
        total = sum(measured for _, _, measured in here)
        equal = f"{len(here) - len(off)} of {len(here)}"
        yield f"| {name} | {place} | {total:,} | {equal} | {', '.join(off) or '-'} |"


if __name__ == "__main__":
    sys.exit(main())
