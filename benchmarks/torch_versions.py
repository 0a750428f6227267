"""Does ``estimate`` run under other versions of torch, and does it say the same?

    python benchmarks/torch_versions.py PYTHON ... [-o docs/torch-versions.md]

Each PYTHON is an interpreter of an environment with fsdp-doctor and one version of torch. Specs of
recorded runs are estimated by each; the peaks are set beside the recorded ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from page import write_table

from fsdp_doctor.runs import load_run
from fsdp_doctor.runs.summary import steady_peak_bytes

PROFILES = Path(__file__).parent.parent / "profiles" / "h200"
SPECS = ("fsdp2-reshard", "fsdp2-accumulate-no-sync", "fsdp1-full-shard", "ddp")
WORLD_SIZE = 8


def version(python: str) -> str:
    """Return the torch that an interpreter has."""
    return said([python, "-c", "import torch; print(torch.__version__)"]).strip()


def said(command: list[str]) -> str:
    """Return what a command prints. Raises CalledProcessError when it fails."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def estimate(python: str, spec: str) -> int | str:
    """Return the allocated peak of a steady step, or why there is none."""
    path = PROFILES / "specs" / f"{spec}.yaml"
    asked = ["estimate", str(path), "--world-size", str(WORLD_SIZE), "--json"]
    try:
        answer: Any = json.loads(said([python, "-W", "ignore", "-m", "fsdp_doctor", *asked]))
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip().splitlines()[-1][:100]
    peak: int = answer["ranks"][0]["steady"]["peak_allocated_bytes"]
    return peak


def recorded(spec: str) -> tuple[int, str]:
    """Return the recorded peak, and the torch that it was recorded with."""
    run = load_run(PROFILES / f"world-{WORLD_SIZE}" / spec)
    return steady_peak_bytes(run.ranks[0]), str(run.manifest.environment["torch"])


def row(python: str) -> str:
    """Return the table's line of one interpreter."""
    cells = []
    for spec in SPECS:
        found = estimate(python, spec)
        away = found if isinstance(found, str) else f"{found - recorded(spec)[0]:+,}"
        cells.append(away)
    return f"| {version(python)} | {' | '.join(cells)} |"


def main() -> int:
    """Print the table; exit with 1 when a version cannot estimate one of the specs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("-o", "--output", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    peaks = [f"{recorded(spec)[0]:,}" for spec in SPECS]
    lines = [f"| torch | {' | '.join(SPECS)} |", "|---|" + "--:|" * len(SPECS)]
    lines.append(f"| recorded, {recorded(SPECS[0])[1]} | {' | '.join(peaks)} |")
    for python in arguments.pythons:
        lines.append(row(python))
        print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        write_table(arguments.output, text)
    return int("error:" in text)


if __name__ == "__main__":
    sys.exit(main())
