"""``benchmarks/estimate_accuracy.py``: which runs it takes, what it says where there is nothing to
say, and the estimates beside it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.gpus_table import find_gpu
from fsdp_doctor.model.spec import ProfileSpec

ROOT = Path(__file__).parents[2]
WORKLOAD = {
    "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 512},
    "micro_batch": 3,
    "sequence_length": 32,
}


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import estimate_accuracy

    return estimate_accuracy


def copied(folder: Path, name: str, world_size: int = 8, **manifest: object) -> None:
    """A recorded run under another name, its manifest changed."""
    target = folder / name
    shutil.copytree(ROOT / "profiles" / "h200" / "world-8" / "fsdp2-reshard", target)
    path = target / "run.json"
    raw = json.loads(path.read_text()) | {"world_size": world_size} | manifest
    path.write_text(json.dumps(raw), encoding="utf-8")


def test_every_finished_gpu_run_under_profiles_is_taken(
    accuracy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever set it is of; not what failed, and not what ran on a CPU."""
    copied(tmp_path, "h200/world-64/a", 64)
    copied(tmp_path, "h200/world-8/a")
    copied(tmp_path, "h200/oom/a", 2, status="failed")
    copied(tmp_path, "h200-held-out/world-8/new")
    copied(tmp_path, "h200-megatron/of-2/ddp", 2)
    copied(tmp_path, "h200-megatron/checkpoint-torch-dcp/ddp", 1)
    copied(tmp_path, "h200-megatron/of-8/on-cpu", 8, device_type="cpu")
    monkeypatch.setattr(accuracy, "PROFILES", tmp_path)
    found = accuracy.recorded_runs()
    sizes = [accuracy.load_run(path).manifest.world_size for path in found]
    assert [accuracy.name_of(*pair) for pair in zip(found, sizes, strict=True)] == [
        "1 of 8: a",
        "1 of 64: a",
        "held out, 1 of 8: new",
        "megatron, 1 of 1: ddp (checkpoint-torch-dcp)",
        "megatron, 1 of 2: ddp",
    ]
    assert [p.name for p in found if "h200-held-out" in accuracy.called(p)] == ["new"]


def test_columns_without_a_number_stay_blank(accuracy: Any) -> None:
    """They count in no median, and what could not be predicted is told with its reason."""
    rows = [
        accuracy.Row("1 of 8: a", "fsdp2", {"peak": (90, 100)}, {"FSDPMemTracker": 80}),
        accuracy.Row("megatron, 1 of 2: b", "megatron", {"peak": (100, 100)}, {}),
        accuracy.Row("megatron, 1 of 2: c", "megatron", {}, {"closed form": 5}, ("too new",)),
    ]
    text = accuracy.table(rows)
    assert "| all 3, worst | - | - | - | 10.0000 % | - | - | - | - | - | 20.0000 % |" in text
    assert "| megatron (2), exact to the byte | - | - | - | 1 | - | - | - | - | - | - |" in text
    assert "| 1 of 8: a | - | - | - | -10 (-10.000 %) | - | - | - | - |  | -20.0 % |" in text
    assert text.endswith("\nmegatron, 1 of 2: c: too new\n")


def test_reserved_memory_is_recorded_within_the_range_or_not(accuracy: Any) -> None:
    """Of the runs whose low end is known."""
    ends = {"in": (80, 120), "out": (110, 120)}
    rows = [
        accuracy.Row(name, "fsdp1", {"reserved": (high, 100), "reserved, low": (low, 100)}, {})
        for name, (low, high) in ends.items()
    ]
    older = accuracy.Row("old", "fsdp1", {"reserved": (100, 100)}, {})
    assert accuracy.within_range([*rows, older]) == "1 of 2"


def job(strategy: str, **megatron: dict[str, object]) -> ProfileSpec:
    """A spec of four ranks."""
    config = {"strategy": strategy} | ({"megatron": megatron} if megatron else {})
    raw = {"name": "job", "workload": WORKLOAD, "config": config, "world_size": 4}
    return spec_from_mapping(raw, "test")


@pytest.mark.parametrize(
    ("strategy", "megatron", "states"),
    [
        ("ddp", {}, 18_000),
        ("fsdp2", {}, 4 * (4 * 64 * 64 + 3 * 64 * 256) + 4_500),
        ("megatron", {"ddp": {"use_distributed_optimizer": True}}, 9_000),
        ("megatron", {"model": {"bf16": True}}, 18_000),
        ("megatron", {"dist": {"use_megatron_fsdp": True}}, None),
    ],
)
def test_closed_forms(
    accuracy: Any, strategy: str, megatron: dict[str, Any], states: int | None
) -> None:
    """By hand for 1000 parameters, 96 tokens, width 64: states, two layers, embedding and head."""
    found = accuracy.closed_form_bytes(job(strategy, **megatron), 1000)
    activations = 2 * 96 * (18 * 64 + 4 * 256) + 4 * 96 * (64 + 512)
    assert found == (None if states is None else states + activations)


def test_recomputed_layers_keep_their_inputs(accuracy: Any) -> None:
    """Two bytes for each element of a layer's input."""
    how = {"recompute_granularity": "full", "recompute_method": "uniform"}
    spec = job("megatron", model=how | {"recompute_num_layers": 1})
    found = accuracy.closed_form_bytes(spec, 1000)
    assert found == 18_000 + 2 * 2 * 96 * 64 + 4 * 96 * (64 + 512)


def test_torch_s_own_tracker_finds_the_same_tensors(tmp_path: Path) -> None:
    """Its steady peak is the simulated one but for rounding and cuBLAS's two workspaces, one of the
    thread that runs forward and one of autograd's.
    """
    spec = tmp_path / "job.yaml"
    config = {"strategy": "fsdp2", "gradient_accumulation": {"steps": 2}}
    raw = {"name": "job", "workload": WORKLOAD, "config": config, "world_size": 4}
    spec.write_text(json.dumps(raw), encoding="utf-8")
    script = ROOT / "benchmarks" / "torch_tracker.py"
    commands = ([str(script)], ["-m", "fsdp_doctor", "estimate", "--json"])
    both = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *command, str(spec)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    said = [process.communicate(timeout=100)[0] for process in both]
    steady = json.loads(said[1])["ranks"][0]["steady"]
    tracked = int(said[0].replace(",", ""))
    workspaces = 2 * find_gpu("h200").cublas_workspace_bytes
    assert 0 <= steady["peak_allocated_bytes"] - workspaces - tracked < 0.01 * tracked
