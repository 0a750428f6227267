"""Iteration and memory lines of every framework become the history; growth is told from noise."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from fsdp_doctor.logs.history import RankHistory, growth_of
from fsdp_doctor.logs.scan import ScannedLogs, scan_logs
from fsdp_doctor.logs.sources import find_logs

GIB = 2**30


def read(tmp_path: Path, *lines: str) -> ScannedLogs:
    """Read lines as a log."""
    path = tmp_path / "job.out"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return scan_logs(find_logs([path])[0])


def test_megatron_lm(tmp_path: Path) -> None:
    """Iteration lines give step times, memory lines of each rank MiB."""
    result = read(
        tmp_path,
        " [2026-08-22 10:00:00.1] iteration       10/     100 | consumed samples:         1280 |"
        " elapsed time per iteration (ms): 512.3 | throughput per GPU (TFLOP/s/GPU): 410.2 |",
        "[Rank 5] (after 10 iterations) memory (MB) | allocated: 10.50 | max allocated: 15.25 |"
        " reserved: 16.00 | max reserved: 16.00",
        " iteration 11/ 100 | elapsed time per iteration (ms): 500.0 | learning rate: 1E-3 |",
    )
    history = result.history
    assert list(history.ranks[None].time_steps) == [10, 11]
    assert list(history.ranks[None].times_s) == pytest.approx([0.5123, 0.5])
    rank = history.ranks[5]
    assert (list(rank.memory_steps), list(rank.allocated)) == ([10], [10.5 * 2**20])
    assert history.total_steps == 100


def test_megatron_bridge(tmp_path: Path) -> None:
    """Bridge prints decimal GB."""
    result = read(
        tmp_path,
        "[Rank 0] (after 10 iterations) memory (GB) | mem-allocated-gigabytes: 10.738 |"
        " mem-active-gigabytes: 10.738 | mem-inactive-gigabytes: 0.21 | mem-reserved-gigabytes:"
        " 16.777 | mem-max-allocated-gigabytes: 16.106 | mem-max-active-gigabytes: 16.2",
    )
    rank = result.history.ranks[0]
    assert [rank.allocated[0], rank.reserved[0], rank.peak[0]] == pytest.approx(
        [10.738e9, 16.777e9, 16.106e9]
    )


def test_torchtitan_with_colours(tmp_path: Path) -> None:
    """Torchtitan's line is read with and without colours, by rank."""
    plain = "- root - INFO - step:  7  loss: 12.2764  memory: 59.75GiB(75.75%)  tps: 1,436"
    color = "\x1b[31mstep:  8  \x1b[32mloss:  4.1  \x1b[38;2;1;2;3mmemory:  1.50GiB(2%)\x1b[0m"
    result = read(tmp_path, f"[rank3]:[titan] {plain}", f"[rank3]:[titan] {color}")
    rank = result.history.ranks[3]
    assert list(rank.memory_steps) == [7, 8]
    assert list(rank.reserved) == [59.75 * GIB, 1.5 * GIB]


def test_deepspeed(tmp_path: Path) -> None:
    """The throughput timer in both spellings, and see_memory_usage."""
    result = read(
        tmp_path,
        "[timer.py:193:stop] 0/50, SamplesPerSec=8.58, MemAllocated=1.13GB, MaxMemAllocated=2.5GB",
        "[timer.py:260:stop] epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=1.0,"
        " CurrSamplesPerSec=1.1, MemAllocated=1.25GB, MaxMemAllocated=3.0GB",
        "[utils.py:1:see_memory_usage] MA 0.5 GB         Max_MA 0.75 GB         CA 1.0 GB         "
        "Max_CA 1 GB ",
    )
    rank = result.history.ranks[None]
    assert sorted(rank.memory_steps) == [-1, 10, 50]
    assert sorted(rank.peak) == [0.75 * GIB, 2.5 * GIB, 3.0 * GIB]


def test_progress_bars(tmp_path: Path) -> None:
    """HF's and Lightning's bars give steps and times; bars of loading and mapping do not."""
    result = read(
        tmp_path,
        "Loading checkpoint shards:  53%|##### | 8/15 [00:16<00:14,  2.04s/it]",
        "  1%|1 | 13/900 [3:49:59<22:49:16, 2.50s/it, loss=4.96]\r"
        "  2%|1 | 14/900 [3:50<22, 4.00it/s]",
        "Epoch 0:  10%|#  | 20/200 [00:05<00:45, 2.00it/s, v_num=0, loss=1.2]",
        "Map:  10%|#  | 20/200 [00:05<00:45, 2.00 examples/s]",
    )
    rank = result.history.ranks[None]
    assert list(rank.time_steps) == [13, 14, 20]
    assert list(rank.times_s) == [2.5, 0.25, 0.5]


def test_litgpt_and_other_loops(tmp_path: Path) -> None:
    """Litgpt's iteration line, and a loop of one's own that prints memory with its unit."""
    result = read(tmp_path, "iter 3436 step 53: loss 2.99, iter time: 400.10ms")
    assert list(result.history.ranks[None].times_s) == pytest.approx([0.4001])
    result = read(tmp_path, "step 3 loss 2.1 allocated 2.50 GiB", "step 4 loss 2.0 reserved=512 MB")
    rank = result.history.ranks[None]
    assert rank.allocated[0] == 2.5 * GIB
    assert math.isnan(rank.allocated[1])
    assert rank.reserved[1] == 512 * 2**20


def series(values: list[float]) -> RankHistory:
    """A history with these allocated bytes."""
    history = RankHistory()
    history.memory_steps.extend(range(len(values)))
    history.allocated.extend(values)
    history.peak.extend([math.nan] * len(values))
    history.reserved.extend([math.nan] * len(values))
    return history


def test_a_leak_grows() -> None:
    """A steady rise with noise is growth, with the right rate."""
    draw = random.Random(0)
    found = growth_of(3, series([1e10 + 2e7 * i + draw.gauss(0, 2e7) for i in range(200)]))
    assert found is not None
    assert found.rank == 3
    assert found.bytes_per_step == pytest.approx(2e7, rel=0.2)


@pytest.mark.parametrize(
    "values",
    [
        [1e10] * 100,
        [1e10] * 60 + [1.5e10] * 40,
        [1e10 + 1e8 * (i % 7) for i in range(100)],
        [5e9] + [1e10] * 99,
        [1e10, 2e10, 3e10],
    ],
    ids=["flat", "one jump", "noise", "first step", "too few"],
)
def test_no_leak(values: list[float]) -> None:
    """A plateau, one jump, noise, the first step's rise and three lines are no growth."""
    assert growth_of(None, series(values)) is None
