"""A reader of standard output that leaves early, as ``head`` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "fsdp_doctor" / "demo"
A, B = str(DEMO / "fsdp2-reshard.yaml"), str(DEMO / "fsdp2-no-reshard.yaml")
COMMANDS = {
    "help": ["--help"],
    "diff": ["diff", A, B],
    "diff-json": ["diff", A, B, "--json"],
    "show": ["show", A],
    "report": ["report", str(ROOT / "profiles" / "h200" / "oom" / "fsdp2-reshard")],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_closed_pipe_is_no_error(arguments: list[str]) -> None:
    """The command ends quietly with status 0."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fsdp_doctor", *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_bad_input_is_still_an_error() -> None:
    """A reader that left does not turn status 2 into 0."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fsdp_doctor", "show", "no-such-file.yaml"],
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == 2
