"""Checkpoints of torch's engines on two gloo ranks: saved, erased, loaded, and told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import Run
from fsdp_doctor.runs import load_run

ROOT = Path(__file__).parent.parent.parent
STRATEGIES = ("ddp", "fsdp1", "fsdp2")
FORMATS = ("full", "torch_dcp")
NAMES = [f"{strategy}-{kind}" for strategy in STRATEGIES for kind in FORMATS]
SPEC = """
world_size: 2
workload:
  model: {{layers: 2, hidden: 32, heads: 2, vocab: 64}}
  sequence_length: 8
config: {{strategy: {strategy}}}
checkpoint: {kind}
steps: {{timed: 1, kernel_profile: false}}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Every strategy with every format, in one command."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in NAMES:
        strategy, _, kind = name.partition("-")
        (folder / f"{name}.yaml").write_text(SPEC.format(strategy=strategy, kind=kind))
    specs = [str(folder / f"{name}.yaml") for name in NAMES]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fsdp_doctor", "profile", *specs),
            *("-o", str(folder / "runs"), "--device", "cpu", "--json"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: load_run(folder / "runs" / name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_parameters_come_back(runs: dict[str, Run], name: str) -> None:
    """Erased parameters are those that were saved, on both ranks, whatever the format."""
    kind = name.partition("-")[2]
    for series in runs[name].ranks:
        record = series.checkpoint
        assert record is not None
        assert (record.format, record.restored) == (kind, True)
        (step,) = (step for step in series.steps if step.kind == "checkpoint")
        phases = [phase for phase in step.phases if phase.phase is not Phase.UNKNOWN]
        assert [p.phase for p in phases] == [Phase.CHECKPOINT_SAVE, Phase.CHECKPOINT_LOAD]
        assert all(phase.time_s and phase.time_s > 0 for phase in phases)
        assert record.host_before_bytes is not None
        assert (record.save_host_peak_bytes or 0) >= record.host_before_bytes
        assert record.load_host_peak_bytes
        sizes = runs[name].manifest.sizes
        assert sizes is not None
        # parameters and two moments in float32, once, whoever wrote them
        assert record.bytes_on_disk > 3 * sizes.parameter_bytes
        assert record.bytes_on_disk < 2 * 3 * sizes.parameter_bytes + (1 << 16)


def test_the_report_tells_save_and_load_of_each_rank(runs: dict[str, Run]) -> None:
    """From the recorded run to JSON and text: format, both phases, both ranks."""
    from fsdp_doctor.report import render_runs

    run = runs["fsdp2-full"]
    ranks = json.loads(render_runs([run], "json"))["runs"][0]["ranks"]
    assert [[p["phase"] for p in rank["checkpoint"]["phases"]] for rank in ranks] == [
        ["checkpoint_save", "checkpoint_load"]
    ] * 2
    text = " ".join(render_runs([run], "terminal").split())
    assert "Every rank got its parameters back." in text
