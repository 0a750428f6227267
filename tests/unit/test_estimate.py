"""Estimates: from a log to numbers, to text and JSON, and what the command refuses."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest

from fsdp_doctor.cli import main
from fsdp_doctor.errors import InputError
from fsdp_doctor.gpus_table import GIB, GPUS, find_gpu
from fsdp_doctor.memory.caching_allocator import AllocatorSettings
from fsdp_doctor.memory.events import EventLog, Label
from fsdp_doctor.memory.replay import StreamNotes
from fsdp_doctor.model.estimate import Estimate, RankEstimate
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.report.estimate_plot import save_sweep_plot
from fsdp_doctor.report.estimate_text import estimate_payload, render_estimate
from fsdp_doctor.simulator.summarise import summarise

MIB = 1 << 20


def small_log() -> EventLog:
    """Parameters, then two steps with an activation; the first makes optimizer state."""
    log = EventLog(identified=True)
    log.begin_phase(-1, Phase.WRAP)
    log.allocate(3 * MIB + 100).label = Label(Category.PARAMETERS)
    for step in range(2):
        log.begin_phase(step, Phase.FORWARD)
        activation = log.allocate(11 * MIB)
        log.begin_phase(step, Phase.BACKWARD)
        log.free(activation)
        log.begin_phase(step, Phase.OPTIMIZER)
        if step == 0:
            log.allocate(6 * MIB).label = Label(Category.OPTIMIZER_STATE)
    log.end_phase()
    return log


def summary(*capacities: int) -> RankEstimate:
    """The estimate of ``small_log``."""
    return summarise(
        small_log(), StreamNotes(), rank=0, settings=AllocatorSettings(), capacities=capacities
    )


def sample(fits: bool | None) -> Estimate:
    """An estimate with one rank."""
    return Estimate(
        world_size=8,
        gpu="h200",
        memory_bytes=140 * GIB,
        fits=fits,
        headroom_bytes=-GIB,
        method="simulated",
        assumptions=("eager",),
        outside_pytorch_bytes=(GIB, 2 * GIB),
        ranks=(summary(),),
    )


def test_categories_sum_to_the_peak_and_rounding_is_named() -> None:
    """Blocks are rounded to 512 bytes; the unsplit rest of a block is category rounding."""
    steady = summary().steady
    parameters = 3 * MIB + 512
    assert steady.categories == {
        "activations": 11 * MIB,
        "optimizer_state": 6 * MIB,
        "parameters": parameters,
        "rounding": MIB,
    }
    assert sum(steady.categories.values()) == steady.peak_allocated_bytes
    assert sum(steady.resident.values()) == steady.resident_bytes == 9 * MIB + 512
    assert steady.peak_phase is Phase.FORWARD
    assert steady.peak_reserved_bytes == steady.peak_reserved_low_bytes == 32 * MIB


def test_the_first_step_is_told_apart() -> None:
    """Optimizer state appears in the first step's last phase."""
    found = summary()
    assert found.first_step.peak_allocated_bytes == 14 * MIB + 512
    assert found.first_step.peak_phase is Phase.FORWARD
    assert found.steady.peak_allocated_bytes == 21 * MIB + 512


def test_a_capacity_is_tried() -> None:
    """The run completes where its segments can be had, and not below."""
    assert summary(40 * MIB, 20 * MIB).fits == {str(40 * MIB): True, str(20 * MIB): False}


def test_json_has_the_keys_of_the_contract() -> None:
    """Every key of the contract is there."""
    payload = estimate_payload(sample(None))
    assert set(payload) == {
        "world_size", "gpu", "memory_bytes", "fits", "headroom_bytes", "method", "assumptions",
        "outside_pytorch_bytes", "ranks", "step_time",
    }  # fmt: skip
    (rank,) = payload["ranks"]
    assert {"rank", "first_step", "steady", "top_allocations"} <= set(rank)


@pytest.mark.parametrize(
    ("fits", "words"), [(True, "fits"), (False, "does not fit"), (None, "may fit")]
)
def test_text_says_whether_it_fits(fits: bool | None, words: str) -> None:
    """The verdict stands in the first line; the table's sum is the peak."""
    stream = StringIO()
    render_estimate(sample(fits), "job", stream)
    lines = stream.getvalue().splitlines()
    assert lines[0].split("  ", 1)[1].strip() == words
    assert any(line.startswith("sum") and "21.00 MiB" in line for line in lines)


def test_a_sweep_is_a_table() -> None:
    """The spec as written comes first, then one row for each change."""
    stream = StringIO()
    render_estimate(sample(True), "job", stream, sweep=[("workload.micro_batch=2", sample(None))])
    lines = stream.getvalue().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("What if"))
    written, changed = lines[start + 2 : start + 4]
    assert written.startswith("as written")
    assert written.endswith("fits")
    assert changed.startswith("workload.micro_batch=2")
    assert changed.endswith("may fit")


def test_a_sweep_is_drawn(tmp_path: Path) -> None:
    """A bar for each variant, its value beside the field's name, every category in the legend."""
    rows = [("as written", sample(True)), ("workload.micro_batch=2", sample(None))]
    save_sweep_plot(rows, "job", tmp_path / "sweep.svg")
    save_sweep_plot(rows, "job", tmp_path / "sweep.png")
    text = (tmp_path / "sweep.svg").read_text(encoding="utf-8")
    for word in ("micro_batch", "as written", "optimizer state", "peak reserved"):
        assert word in text
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_gpus_by_the_names_people_use() -> None:
    """Short and full names are found; an unknown one lists the others."""
    assert find_gpu("NVIDIA H200") is GPUS["h200"]
    assert find_gpu("a100") is GPUS["a100-80"]
    with pytest.raises(InputError, match="one of: h200"):
        find_gpu("abacus")


SPEC = """
name: tiny
workload: {model: {layers: 1, hidden: 64, heads: 2, vocab: 128}}
config: {strategy: fsdp2}
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "abacus"], "unknown GPU"),
        (["--rank", "middle"], "no rank"),
        (["--rank", "9"], "rank 9 is not one of 2"),
        (["--set", "config.fsdp9=1"], "fsdp9"),
        (["--memory", "0"], "memory"),
        (["--alloc-conf", "max_split_size_mb:20"], "more than 20"),
        (["--alloc-conf", "backend:cudaMallocAsync"], "native"),
        (["--sweep", "micro_batch"], "no sweep"),
        (["--sweep", "workload.micro=1,2"], "micro"),
        (["--plot", "a.png"], "without --sweep"),
        (["--sweep", "world_size=2,4", "--plot", "a.gif"], "neither .png nor .svg"),
        (["--sweep", "world_size=2,4", "--plot", "nowhere/a.png"], "no folder"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each ends with exit status 2 and one line that names the option or key."""
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    assert main(["estimate", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The file is named."""
    assert main(["estimate", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


def test_json_of_a_real_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the envelope, and a job that cannot fit is said not to."""
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    assert main(["estimate", str(path), "--world-size", "4", "--memory", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["command"], found["world_size"], found["fits"]) == ("estimate", 4, False)
    steady = found["ranks"][0]["steady"]
    assert sum(steady["categories"].values()) == steady["peak_allocated_bytes"]
