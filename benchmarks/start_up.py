"""CPU time of commands that need no torch, against ``python -c 'import click'`` in the same run.

    python benchmarks/start_up.py

Goal: at most 6 times the floor.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parent.parent / "fsdp_doctor" / "demo"
ROUNDS = 15
COMMANDS = {
    "import click": ["-c", "import click"],
    "--help": ["-m", "fsdp_doctor", "--help"],
    "diff": ["-m", "fsdp_doctor", "diff", str(DEMO / "fsdp2-reshard.yaml"),
             str(DEMO / "fsdp2-no-reshard.yaml")],
}  # fmt: skip


def cpu_s(arguments: list[str]) -> float:
    """Return user + system time of one run."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )


def main() -> int:
    """Run the commands in turn and print the smallest CPU time of each, and its ratio."""
    best = dict.fromkeys(COMMANDS, float("inf"))
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            best[name] = min(best[name], cpu_s(arguments))
    floor = best["import click"]
    for name, seconds in best.items():
        print(f"{name:14} {seconds * 1e3:7.0f} ms CPU  {seconds / floor:5.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
