"""``benchmarks/allocator_replay.py``: the allocator's model on recorded snapshots of an H200."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNAPSHOTS = ROOT / "benchmarks" / "allocator" / "snapshots"
OOMS = ROOT / "tests" / "recorded" / "ooms"


@pytest.fixture(scope="module")
def lines() -> dict[str, list[str]]:
    """Return the cells of the table by trace."""
    paths = [
        SNAPSHOTS / "fsdp1-full-shard-default.pickle.gz",
        SNAPSHOTS / "fsdp2-checkpoint-full-expandable_segments.pickle.gz",
        SNAPSHOTS / "fsdp2-reshard-max_split_size_mb.pickle.gz",
        OOMS / "fsdp1-optimizer-state" / "snapshot.pickle.gz",
        OOMS / "fsdp2-forward-expandable" / "snapshot.pickle.gz",
        OOMS / "megatron-fsdp-forward" / "snapshot.pickle.gz",
    ]
    script = ROOT / "benchmarks" / "allocator_replay.py"
    done = subprocess.run(
        [sys.executable, script, *paths], capture_output=True, text=True, check=True, timeout=120
    )
    cells = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    return {line[0]: line[1:] for line in cells if len(line) == 8}


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("fsdp1-full-shard-default", 217),
        ("fsdp2-checkpoint-full-expandable_segments", 80),
        ("fsdp2-reshard-max_split_size_mb", 315),
        ("fsdp1-optimizer-state", 263),
        ("fsdp2-forward-expandable", 146),
    ],
)
def test_segments_and_reserved_bytes_are_exact(
    lines: dict[str, list[str]], name: str, taken: int
) -> None:
    """After every allocation, of whole steps and of jobs that gave segments back and failed."""
    _, _, segments, _, peak, at_any_time, _ = lines[name]
    assert segments == f"{taken}, {taken}"
    assert (peak, at_any_time) == ("0", "0")


def test_what_differs_is_where_the_driver_places_segments(lines: dict[str, list[str]]) -> None:
    """With each segment at its recorded address, the one that is off is exact too."""
    *_, at_any_time, recorded_addresses = lines["megatron-fsdp-forward"]
    assert at_any_time.startswith("20,971,520 ")
    assert recorded_addresses == "0"
