"""``benchmarks/allocator_settings.py``: what it asks a GPU for and how it reads the answers. The
GPU is a stand-in here: a module called torch whose allocator is the model.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "allocator_settings.py"
MIB = 1 << 20
TORCH = """
import os
from dataclasses import replace
from types import SimpleNamespace

from fsdp_doctor.memory.allocator_conf import parse_alloc_conf
from fsdp_doctor.memory.caching_allocator import OutOfMemoryModelled
from fsdp_doctor.memory.expandable_segments import make_allocator

TOTAL = 1 << 30
__version__ = "0.0"
_conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
assert os.environ.get("PYTORCH_ALLOC_CONF", "") == _conf
if "max_split" in _conf:
    raise ImportError("this setting is broken")
_settings = parse_alloc_conf(_conf)
_allocator = make_allocator(_settings)
_blocks, _peak = [], [0, 0]


class OutOfMemoryError(RuntimeError):
    pass


def _limit(fraction):
    _allocator.__init__(replace(_settings, capacity_bytes=int(TOTAL * fraction)))


def _allocate(size, device, stream):
    try:
        block = _allocator.allocate(size, id(stream))
    except OutOfMemoryModelled:
        raise OutOfMemoryError from None
    _peak[:] = max(_peak[0], _allocator.reserved_bytes), max(_peak[1], _allocator.allocated_bytes)
    _blocks.append(block)
    return len(_blocks)


def _stats():
    return {
        "reserved_bytes.all.peak": _peak[0],
        "reserved_bytes.all.current": _allocator.reserved_bytes,
        "allocated_bytes.all.peak": _peak[1],
        "num_device_alloc": _allocator.segment_allocations,
        "num_alloc_retries": _allocator.retries,
    }


cuda = SimpleNamespace(
    init=lambda: None,
    get_device_properties=lambda index: SimpleNamespace(total_memory=TOTAL),
    get_device_name=lambda: "stand-in",
    set_per_process_memory_fraction=_limit,
    current_stream=object,
    Stream=object,
    OutOfMemoryError=OutOfMemoryError,
    caching_allocator_alloc=_allocate,
    caching_allocator_delete=lambda pointer: _allocator.free(_blocks[pointer - 1]),
    memory_reserved=lambda: _allocator.reserved_bytes,
    memory_stats=_stats,
)
"""


def run(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with the stand-in."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(folder), "PYTORCH_CUDA_ALLOC_CONF": "nonsense:1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    """Four cases of a small trace, played on the stand-in: raw answers and the table."""
    folder = tmp_path_factory.mktemp("stand-in")
    (folder / "torch.py").write_text(TORCH, encoding="utf-8")
    events: list[Any] = [[30 * MIB, 0], [8 * MIB, 1], [600, 0], 0, [40 * MIB, 0], [20 * MIB, 0], 4]
    confs = [("", None), ("expandable_segments:True", None), ("max_split_size_mb:32", None)]
    cases = [{"conf": conf, "limit": limit} for conf, limit in [*confs, ("", 63 * MIB)]]
    trace = folder / "small.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"events": events, "cases": cases}).encode()))
    raw = folder / "raw.json"
    done = run("play", trace, "-o", raw, folder=folder)
    assert done.returncode == 1, done.stderr
    told = run("table", raw, "--traces", folder, folder=folder)
    assert told.returncode == 0, told.stderr
    return raw, json.loads(raw.read_text()), told.stdout


def test_every_case_is_played_under_its_own_setting_and_limit(
    played: tuple[Path, list[dict[str, Any]], str],
) -> None:
    """Not under what the environment had."""
    _, answers, _ = played
    plain, expandable, _, limited = answers
    assert (plain["peak"], plain["failed_at"]) == ((30 + 20 + 2 + 40) * MIB, None)
    assert expandable["peak"] == (60 + 20 + 2) * MIB
    assert (limited["failed_at"], limited["retries"], limited["last"]) == (5, 2, 62 * MIB)


def test_a_case_that_breaks_leaves_the_others(
    played: tuple[Path, list[dict[str, Any]], str],
) -> None:
    """It is an answer with its error, and the table says so."""
    _, answers, text = played
    assert [("error" in answer) for answer in answers] == [False, False, True, False]
    assert re.search(r"^Not played: small max_split_size_mb:32: .*broken", text, re.M | re.S)


def test_the_table_sets_the_model_beside_what_was_counted(
    played: tuple[Path, list[dict[str, Any]], str], tmp_path: Path
) -> None:
    """No difference where the GPU is the model; a GPU that counted otherwise is told of."""
    raw, answers, text = played
    assert "exact in 3 of 3 cases" in text
    assert "the same in 3 of 3" in text
    assert re.search(r"In 3 cases nothing changes .* of those 3 agree in everything", text)
    answers[0] |= {"peak": 100 * MIB, "over_time": [50] * len(answers[0]["over_time"])}
    answers[3] |= {"failed_at": None}
    changed = tmp_path / "raw.json"
    changed.write_text(json.dumps(answers), encoding="utf-8")
    told = run("table", changed, "--traces", raw.parent, folder=raw.parent).stdout
    assert "-8,388,608 (-8.00%)" in told
    assert "exact in 2 of 3 cases" in told
    assert "| fits; model: out of memory at event 5 |" in told


def test_a_case_that_hangs_on_addresses_is_told_apart(
    played: tuple[Path, list[dict[str, Any]], str], tmp_path: Path
) -> None:
    """Of two free blocks of one size the lower is taken: the rest of a segment, or a whole one that
    could be given back.
    """
    raw, _, _ = played
    sizes = [30, 20, 10, 20, 50]
    ask = [[size * MIB, 0] for size in sizes]
    events: list[Any] = [ask[0], ask[1], 0, ask[2], 1, ask[3], ask[4]]
    cases = [{"conf": "", "limit": 81 * MIB}, {"conf": "", "limit": None}]
    trace = tmp_path / "tie.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"events": events, "cases": cases}).encode()))
    answers = tmp_path / "raw.json"
    assert run("play", trace, "-o", answers, folder=raw.parent).returncode == 0
    told = run("table", answers, "--traces", tmp_path, folder=raw.parent).stdout
    assert re.search(r"\| 0\.079 \|.*\| out of memory at event 6, both \| yes \|", told)
    assert "In 1 cases nothing changes" in told
