"""Record on GPUs what profiles/ holds, or what is still missing.

    python profiles/record.py --list
    python profiles/record.py h200/world-8 h200-megatron/of-2 --max-minutes 9

Each set is one `fsdp-doctor profile` command. What is recorded already is left alone, so a set that
was cut short goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
MEMORY_ONLY = ("--set", "steps.timed=6", "--set", "steps.kernel_profile=false")
"""For sets whose times nobody asks for: half the seconds of device time."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One set of runs."""

    specs: tuple[str, ...]
    """Files and patterns under profiles/."""
    arguments: tuple[str, ...]
    """Of `fsdp-doctor profile`."""
    without: tuple[str, ...] = ()
    """Parts of the names of specs that belong to other world sizes."""

    def paths(self) -> list[Path]:
        """Return the specs, sorted by name."""
        found = {path for pattern in self.specs for path in HERE.glob(pattern)}
        return sorted(p for p in found if not any(part in p.stem for part in self.without))


TORCH = ("h200/specs/*.yaml",)
COMPARED = ("factorial", "decoys", "sgd", "pure-bf16", "scaler", "clip", "selective", "timing")
"""Specs of pairs that are looked at as one rank of 2 only."""
MESHES_OF_8 = ("hsdp-8", "hybrid-8", "reshard-to-2")
MEGATRON = ("h200-megatron/specs/*.yaml",)

SETS: dict[str, Recording] = {
    "h200/world-2": Recording(
        specs=TORCH,
        arguments=("--one-rank-of", "2"),
        without=(*MESHES_OF_8, "hsdp-64", "timing"),
    ),
    "h200/world-8": Recording(
        specs=TORCH,
        arguments=("--one-rank-of", "8", *MEMORY_ONLY),
        without=(*COMPARED, "hsdp-64", "orig-params"),
    ),
    "h200/world-64": Recording(
        specs=TORCH,
        arguments=("--one-rank-of", "64", *MEMORY_ONLY),
        without=(*COMPARED, *MESHES_OF_8),
    ),
    "h200/oom": Recording(
        specs=("h200/specs/fsdp2-reshard.yaml",),
        arguments=("--one-rank-of", "2", "--memory-fraction", "0.06"),
    ),
    # not used while the simulator was written: recorded last and reported as found
    "h200-held-out/world-8": Recording(
        specs=("h200-held-out/specs/*.yaml",), arguments=("--one-rank-of", "8", *MEMORY_ONLY)
    ),
    "h200-megatron/of-2": Recording(specs=MEGATRON, arguments=("--one-rank-of", "2")),
    "h200-megatron/of-8": Recording(specs=MEGATRON, arguments=("--one-rank-of", "8", *MEMORY_ONLY)),
    "h200x2/torch": Recording(
        specs=TORCH, arguments=(), without=(*MESHES_OF_8, "hsdp-64", "timing")
    ),
    "h200x2/megatron": Recording(specs=MEGATRON, arguments=()),
} | {
    f"h200-megatron/checkpoint-{form.replace('_', '-')}": Recording(
        specs=(f"h200-megatron/specs/{spec}.yaml",),
        arguments=("--set", "world_size=1", "--checkpoint", form, *MEMORY_ONLY),
    )
    for form, spec in (
        ("torch_dist", "distopt"),
        ("fsdp_dtensor", "fsdp-params"),
        ("torch_dcp", "torch-fsdp2"),
    )
}
"""Folder under profiles/ -> how to record it. Those of h200x2 need two GPUs."""


def missing(name: str, output: Path) -> list[Path]:
    """Return the specs of a set of which there is no run below ``output``, or half a one."""
    return [path for path in SETS[name].paths() if not _ended(output / name / path.stem)]


def _ended(run: Path) -> bool:
    """Whether a run came to an end of its own, be it a failure."""
    try:
        status = json.loads((run / "run.json").read_text())["status"]
    except (OSError, ValueError, KeyError):
        return False
    return status in ("completed", "failed")


def command(name: str, specs: list[Path], output: Path) -> list[str]:
    """Return the command that records these specs of a set."""
    # a single spec is recorded into the folder itself, several into folders of their own
    folder = output / name / specs[0].stem if len(specs) == 1 else output / name
    profile = [sys.executable, "-m", "fsdp_doctor", "profile", *map(str, specs)]
    # --force: what is left of an interrupted run
    return [*profile, *SETS[name].arguments, "--device", "cuda", "--force", "-o", str(folder)]


def record(name: str, output: Path, until: float) -> bool:
    """Record what is missing of a set; False: time was up."""
    specs = missing(name, output)
    if not specs:
        return True
    with subprocess.Popen(command(name, specs, output)) as process:
        try:
            process.wait(timeout=max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # ends the run cleanly, like Ctrl-C
            return False
    return True


def main() -> int:
    """Record the sets; exit status 1 when something of them is still missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="*", metavar="SET", choices=[*SETS, []])
    parser.add_argument("--list", action="store_true", help="say what there is and what is missing")
    parser.add_argument("-o", "--output", type=Path, default=HERE)
    parser.add_argument("--max-minutes", type=float, default=float("inf"))
    chosen = parser.parse_args()
    sets = chosen.sets or list(SETS)
    if not chosen.list:
        until = time.monotonic() + min(chosen.max_minutes * 60, 1e9)
        for name in sets:
            if not record(name, chosen.output, until):
                break
    for name in sets:
        lacking = missing(name, chosen.output)
        print(f"{name}: {len(SETS[name].paths())} specs, {len(lacking)} not recorded")
    return int(any(missing(name, chosen.output) for name in sets) and not chosen.list)


if __name__ == "__main__":
    sys.exit(main())
