"""CPU time of ``diff`` and ``check`` of flat 300-key configs, against ``python -c 'import click'``.

    python benchmarks/config_speed.py

Goals, whole process, best of several rounds: 0.3 s of CPU where values are scalars, 0.8 s where
lists differ and deepdiff is imported. Exit status 1 when one is missed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROUNDS = 10
KEYS = 300
GOALS = {"flat": 0.3, "flat, text": 0.3, "check": 0.3, "lists differ": 0.8}


def config(side: int, *, lists: bool) -> dict[str, Any]:
    """Return HF TrainingArguments with ``KEYS`` keys, a third of which depend on ``side``."""
    found: dict[str, Any] = {
        "per_device_train_batch_size": 1 + side,
        "gradient_accumulation_steps": 8,
        "bf16": True,
        "fsdp": "full_shard auto_wrap" if side else "shard_grad_op auto_wrap",
    }
    for number in range(KEYS - len(found)):
        found[f"custom_argument_{number}"] = number + (side if number % 3 == 0 else 0)
    if lists:
        found["layers_to_wrap"] = [f"Block{side}", {"name": "Head", "rank": side}]
    return found


def cpu_s(arguments: list[str]) -> float:
    """Return user and system time of one process."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return (after.children_user - before.children_user) + (
        after.children_system - before.children_system
    )


def main() -> int:
    """Print the best CPU time of each command and its ratio to the floor."""
    with tempfile.TemporaryDirectory() as folder:
        commands = {"import click": ["-c", "import click"], **_commands(Path(folder))}
        best = dict.fromkeys(commands, float("inf"))
        for _ in range(ROUNDS):
            for name, arguments in commands.items():
                best[name] = min(best[name], cpu_s(arguments))
    floor = best["import click"]
    missed = False
    for name, seconds in best.items():
        goal = GOALS.get(name)
        late = goal is not None and seconds > goal
        missed = missed or late
        shown = "" if goal is None else f"  goal {goal:.1f} s{', missed' if late else ''}"
        print(f"{name:14} {seconds * 1e3:5.0f} ms CPU  {seconds / floor:5.2f} x{shown}")
    return 1 if missed else 0


def _commands(folder: Path) -> dict[str, list[str]]:
    """Write the configs and return the commands that compare and check them."""
    commands = {}
    for name in GOALS:
        paths = []
        for side in (0, 1):
            path = folder / f"{name.replace(', ', '_').replace(' ', '_')}_{side}.json"
            path.write_text(json.dumps(config(side, lists="lists" in name), indent=1))
            paths.append(str(path))
        options = [] if "text" in name else ["--json"]
        if name == "check":
            commands[name] = ["-m", "fsdp_doctor", "check", paths[0], *options]
        else:
            commands[name] = ["-m", "fsdp_doctor", "diff", *paths, *options]
    return commands


if __name__ == "__main__":
    sys.exit(main())
