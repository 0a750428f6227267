"""Does ``estimate`` run under other versions of torch, and does it say the same?

    python benchmarks/torch_versions.py PYTHON ... [-o docs/torch-versions.md]

Each PYTHON is an interpreter of an environment with fsdp-doctor and one version of torch. What was
run on a GPU is estimated by each; the peaks are set beside the recorded ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from page import show

from fsdp_doctor.runs import load_run
from fsdp_doctor.runs.summary import steady_peak_bytes

PROFILES = Path(__file__).parent.parent / "profiles"
RUNS = {
    "fsdp2-reshard": "h200/world-8/fsdp2-reshard",
    "fsdp2-accumulate-no-sync": "h200/world-8/fsdp2-accumulate-no-sync",
    "fsdp1-full-shard": "h200/world-8/fsdp1-full-shard",
    "ddp": "h200/world-8/ddp",
    "fsdp2, bf16 weights, autocast": "h200-fit/ddp/prescription-2",
}
"""Column -> recorded run; the last is a case in which versions of torch differ."""


def version(python: str) -> str:
    """Return the torch that an interpreter has."""
    return said([python, "-c", "import torch; print(torch.__version__)"]).strip()


def said(command: list[str]) -> str:
    """Return what a command prints. Raises CalledProcessError when it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def estimate(python: str, name: str) -> int | str:
    """Return the allocated peak of a steady step, or why there is none."""
    manifest = load_run(PROFILES / RUNS[name]).manifest
    raw = dict(manifest.spec or {}) | {"world_size": manifest.world_size}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(raw, file)  # JSON is YAML
        file.flush()
        asked = ["estimate", file.name, "--json"]
        try:
            answer: Any = json.loads(said([python, "-W", "ignore", "-m", "fsdp_doctor", *asked]))
        except subprocess.CalledProcessError as error:
            return str(error.stderr).strip().splitlines()[-1][:100]
    peak: int = answer["ranks"][0]["steady"]["peak_allocated_bytes"]
    return peak


def recorded(name: str) -> tuple[int, str]:
    """Return the recorded peak, and the torch that it was recorded with."""
    run = load_run(PROFILES / RUNS[name])
    found = steady_peak_bytes(run.ranks[0])
    assert found is not None
    return found, str(run.manifest.environment["torch"])


def row(python: str, names: Sequence[str]) -> str:
    """Return the table's line of one interpreter."""
    cells = []
    for name in names:
        found = estimate(python, name)
        away = found if isinstance(found, str) else f"{found - recorded(name)[0]:+,}"
        cells.append(away)
    return f"| {version(python)} | {' | '.join(cells)} |"


def main() -> int:
    """Print the table; exit with 1 when a version cannot estimate one of the specs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--run", action="append", choices=list(RUNS), help="only this column")
    parser.add_argument("-o", "--output", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    names = arguments.run or list(RUNS)
    peaks = [f"{recorded(name)[0]:,}" for name in names]
    lines = [f"| torch | {' | '.join(names)} |", "|---|" + "--:|" * len(names)]
    lines.append(f"| recorded, {recorded(names[0])[1]} | {' | '.join(peaks)} |")
    for python in arguments.pythons:
        lines.append(row(python, names))
        print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    show(text, arguments.output)
    return int("error:" in text)


if __name__ == "__main__":
    sys.exit(main())
