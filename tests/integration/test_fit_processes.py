"""``fit`` from the command line to real runs on a CPU, and its agreement with ``estimate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fsdp_doctor.cli import main
from fsdp_doctor.config.spec import load_written_spec
from fsdp_doctor.gpus_table import find_gpu
from fsdp_doctor.simulator.estimate import estimate
from fsdp_doctor.simulator.many import Simulations

SPEC = """
name: tiny
world_size: 2
workload:
  model: {layers: 2, hidden: 128, heads: 4, vocab: 8192}
  micro_batch: 2
  sequence_length: 512
config:
  strategy: fsdp2
  fsdp2: {reshard_after_forward: true}
steps: {warmup: 3, timed: 1, kernel_profile: false}
"""
MIB = 1 << 20
KEPT = (
    "config.strategy,config.fsdp2,config.precision,config.optimizer,"
    "config.activation_checkpointing,PYTORCH_CUDA_ALLOC_CONF"
)


def test_a_prescription_is_simulated_as_estimate_does_and_really_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one change that is left open halves the batch. Its predicted peak is what ``estimate``
    says of the same ``--set``; the run of one of two ranks completes and needs less.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun sets it
    spec = tmp_path / "tiny.yaml"
    spec.write_text(SPEC)
    memory = 2020  # between what both variants need with what lies outside torch
    arguments = ["--memory", f"{memory}MiB", "--one-rank-of", "2", "--json"]
    runs = ["--verify", str(tmp_path / "runs"), "--device", "cpu", "--max-simulations", "4"]
    assert main(["fit", str(spec), *arguments, "--keep", KEPT, *runs]) == 0
    answer = json.loads(capsys.readouterr().out)
    (found,) = answer["prescriptions"]
    assert found["overrides"] == [
        "workload.micro_batch=1",
        "config.gradient_accumulation.steps=2",
    ]
    assert found["numerics"] == "same"
    assert answer["simulations"] == 2

    changed = load_written_spec(spec, found["overrides"]).spec
    with Simulations() as server:
        said = estimate(
            changed, gpu=find_gpu("h200"), memory_bytes=memory * MIB, run=server.simulate
        )
    (rank,) = said.ranks
    assert found["peak_allocated_bytes"] == rank.steady.peak_allocated_bytes
    assert found["peak_reserved_bytes"] == rank.steady.peak_reserved_bytes
    assert found["headroom_bytes"] == said.headroom_bytes

    (before,), (after,) = answer["as_written"]["measured"], found["measured"]
    assert before["status"] == after["status"] == "completed"
    assert 0 < after["peak_allocated_bytes"] < before["peak_allocated_bytes"]
    assert after["step_time_change"] == pytest.approx(
        after["step_time_s"] / before["step_time_s"] - 1
    )
    assert (tmp_path / "runs" / "prescription-1" / "run.json").is_file()
