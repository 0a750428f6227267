"""One rank of N, played in one process, against N real ranks: the same bytes?

    python benchmarks/one_rank.py ALONE REAL [-o docs/one-rank.md]
    python benchmarks/one_rank.py --on-cpu [-o docs/one-rank.md]

ALONE and REAL are folders of runs of the same specs, as ``profiles/h200/world-2`` (recorded with
``--one-rank-of 2``) and a folder recorded by as many ranks. Runs of one name are paired, and rank
for rank compared: allocated peaks of forward, backward and optimizer in the steady steps, the peak
of the first step, what is resident between steps, the peak of reserved memory and what the device
holds outside of PyTorch. Each cell is alone minus real, in bytes; of several ranks the difference
farthest from zero. ``--on-cpu`` records both sides first, of small specs, with two gloo ranks and
the CPU tracker, which counts storages and knows no reserved memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml
from estimate_on_cpu import CASES, spec_text
from page import show

from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import RankSeries
from fsdp_doctor.runs import load_run
from fsdp_doctor.runs.summary import (
    outside_pytorch_bytes,
    peak,
    resident_bytes,
    steady_peak_bytes,
    steady_steps,
)

COLUMNS = (
    "forward",
    "backward",
    "optimizer",
    "first step",
    "resident",
    "reserved",
    "outside PyTorch",
)


def numbers(series: RankSeries) -> dict[str, int | None]:
    """Return column -> bytes of one rank; None: not known there."""
    steady = steady_steps(series)
    outside = [b for step in steady if (b := outside_pytorch_bytes(step)) is not None]
    return {
        **{
            phase.value: steady_peak_bytes(series, phase)
            for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
        },
        "first step": peak([p.peak for p in series.steps[0].phases], "allocated_bytes"),
        "resident": resident_bytes(series),
        "reserved": steady_peak_bytes(series, counter="reserved_bytes"),
        "outside PyTorch": max(outside, default=None),
    }


def differences(alone: Path, real: Path) -> dict[str, int]:
    """Return column -> bytes that a rank played alone has more than the real rank of its number."""
    played, ranks = load_run(alone).ranks, {s.rank: s for s in load_run(real).ranks}
    found: dict[str, int] = {}
    for series in played:
        if series.rank not in ranks:
            raise SystemExit(f"{real}: rank {series.rank} is not recorded")
        ours, theirs = numbers(series), numbers(ranks[series.rank])
        for column in COLUMNS:
            a, b = ours[column], theirs[column]
            if a is not None and b is not None:
                found[column] = max(found.get(column, 0), a - b, key=abs)
    return found


def pairs(alone: Path, real: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield name and folders of the runs that both sides hold, completed."""
    for path in sorted(alone.glob("*/run.json")):
        other = real / path.parent.name / "run.json"
        if other.exists() and all(
            load_run(p.parent).manifest.status == "completed" for p in (path, other)
        ):
            yield path.parent.name, path.parent, other.parent


def table(alone: Path, real: Path) -> str:
    """Return the Markdown table, one row for each pair."""
    rows = [(name, differences(a, b)) for name, a, b in pairs(alone, real)]
    if not rows:
        raise SystemExit(f"{alone} and {real} hold no completed runs of one name")
    lines = [f"| {len(rows)} runs | {' | '.join(COLUMNS)} |", "|---" + "|--:" * len(COLUMNS) + "|"]
    for name, found in rows:
        cells = (f"{found[c]:+,}" if found.get(c) else str(found.get(c, "-")) for c in COLUMNS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def record_on_cpu(folder: Path) -> None:
    """Record every case of ``estimate_on_cpu.py`` by two gloo ranks and as one rank of 2."""
    specs = []
    for name in CASES:
        slug = name.replace(", ", "-").replace(" ", "-")
        path = folder / f"{slug}.yaml"
        raw = yaml.safe_load(spec_text(name)) | {"name": slug}
        path.write_text(yaml.safe_dump(raw), encoding="utf-8")
        specs.append(str(path))
    for side, how in (("alone", ("--one-rank-of", "2")), ("real", ())):
        command = [sys.executable, "-m", "fsdp_doctor", "profile", *specs, *how]
        done = subprocess.run(
            [*command, "--device", "cpu", "-o", str(folder / side)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("alone", type=Path, nargs="?")
    parser.add_argument("real", type=Path, nargs="?")
    parser.add_argument("--on-cpu", action="store_true", help="record both sides here, small")
    parser.add_argument("-o", "--output", type=Path, help="also write the table here")
    arguments = parser.parse_args()
    if arguments.on_cpu:
        with tempfile.TemporaryDirectory() as folder:
            record_on_cpu(Path(folder))
            text = table(Path(folder) / "alone", Path(folder) / "real")
    elif arguments.alone and arguments.real:
        text = table(arguments.alone, arguments.real)
    else:
        parser.error("name two folders of runs, or --on-cpu")
    show(text, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
