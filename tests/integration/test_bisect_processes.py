"""``bisect`` with real processes on the CPU: killed after two points, it goes on and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fsdp_doctor.cli import main
from fsdp_doctor.config.spec import load_spec
from fsdp_doctor.simulator.many import Simulations

SPEC = """
name: {name}
world_size: 2
workload:
  model: {{layers: 1, hidden: 256, heads: 4, ffn: 704, vocab: 4096}}
  micro_batch: 1
  sequence_length: 32
config:
  strategy: fsdp2
{config}
steps: {{warmup: 3, timed: 1, kernel_profile: false}}
"""
B = """
  gradient_accumulation: {steps: 2, sync: last_microbatch}
  optimizer: {max_grad_norm: 1.0}
  fsdp2: {blocks_per_unit: 2}
"""
OPTIONS = ["--one-rank-of", "2", "--device", "cpu"]


def write_specs(folder: Path) -> list[str]:
    """Write both specs; B differs in four fields, of which two act together."""
    a, b = folder / "a.yaml", folder / "b.yaml"
    a.write_text(SPEC.format(name="a", config=""))
    b.write_text(SPEC.format(name="b", config=B))
    return [str(a), str(b)]


def completed(folder: Path) -> dict[str, str]:
    """Return the launches that have ended, and when each was made."""
    found = {}
    for path in sorted(folder.glob("p-*/launch-*/run.json")):
        manifest = json.loads(path.read_bytes())
        if manifest["status"] == "completed":
            found[str(path.parent.relative_to(folder))] = manifest["created"]
    return found


def kill_after(points: int, command: list[str], folder: Path) -> dict[str, str]:
    """Start the command, kill it when so many points have ended, and return these."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_doctor", *command],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while len(completed(folder)) < points and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return completed(folder)


def simulated_peak(path: Path) -> int:
    """Return the steady peak of rank 0 as simulated on a CPU."""
    with Simulations() as simulations:
        found = simulations.ask(load_spec(path), rank=0, device="cpu", workspace_bytes=0)
    assert not isinstance(found, str), found
    return found.steady.peak_allocated_bytes


@pytest.mark.timeout(900)  # on a busy machine
def test_a_killed_search_goes_on_and_finds_the_interaction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation and synchronisation are found as the pair that did it, by ten launches in all,
    none of which is made twice though the first call was killed. The simulation of the job on a
    CPU gives the same peaks (but for scalars). A changed spec is refused.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    specs, runs = write_specs(tmp_path), tmp_path / "runs"
    command = ["bisect", *specs, "-o", str(runs), *OPTIONS]
    before = kill_after(2, command, runs)
    assert len(before) >= 2
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["smallest_set"] == ["batch.accumulation", "comm.grad_sync"]
    (pair,) = found["interactions"]
    assert set(pair["keys"]) == {"batch.accumulation", "comm.grad_sync"}
    shares = {share["keys"][0]: share for share in found["shares"]}
    assert shares["optimizer.grad_clip"]["value"] == 0
    assert shares["sharding.blocks_per_unit"]["value"] == 0
    assert shares["batch.accumulation"]["level"] == 3
    assert sum(s["value"] for s in shares.values()) + found["rest"] == found["delta"]
    after = completed(runs)
    assert len(after) == 10
    assert {name: after[name] for name in before} == before
    assert found["reused"] == len(before)

    points = {tuple(point["flipped"]): point["value"] for point in found["points"]}
    ends = [min(points, key=len), max(points, key=len)]
    for path, end in zip(specs, ends, strict=True):
        assert abs(simulated_peak(Path(path)) - points[end]) < 256

    Path(specs[1]).write_text(Path(specs[1]).read_text().replace("steps: 2", "steps: 4"))
    assert main(command) == 2
    assert "spec B changed since" in capsys.readouterr().err
    assert completed(runs) == after
