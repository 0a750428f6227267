"""``fsdp_doctor.record`` on a plain training loop, one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import user_models

from fsdp_doctor import record
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.runs import load_run


def train(directory: Path, steps: int, *, fail_at: int | None = None) -> torch.nn.Module:
    """Train the test model as README does; return it."""
    model = user_models.build()
    optimizer = torch.optim.AdamW(model.parameters())
    with record(directory, model=model, optimizer=optimizer, name="mine") as recorder:
        for number in range(steps):
            batch = user_models.batch(4, 8, torch.device("cpu"))
            with recorder.step():
                with recorder.phase("forward"):
                    if number == fail_at:
                        raise RuntimeError("out of data")
                    loss = user_models.loss(model(batch), batch)
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                recorder.loss(loss)
    return model


def test_a_plain_loop_is_recorded(tmp_path: Path) -> None:
    """Steps, phases, times, losses and the anatomy of the peak of a loop that is not ours."""
    model = train(tmp_path / "run", 6)
    run = load_run(tmp_path / "run")
    assert (run.manifest.name, run.manifest.status) == ("mine", "completed")
    (series,) = run.ranks
    assert [s.kind for s in series.steps] == ["observed"] * 3 + ["timed"] * 3
    assert all(s.loss_finite and s.step_time_s for s in series.steps)
    assert [p.phase for p in series.steps[5].phases] == ["forward", "backward", "optimizer"]
    assert series.anatomy is not None
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    held = series.anatomy.phases[Phase.FORWARD].categories
    assert held[Category.PARAMETERS] == weights
    assert held[Category.OPTIMIZER_STATE] >= 2 * weights
    with pytest.raises(InputError, match="already holds a run"):
        train(tmp_path / "run", 1)


def test_an_exception_is_recorded_and_passed_on(tmp_path: Path) -> None:
    """The loop's exception reaches the caller; the run says where it happened."""
    with pytest.raises(RuntimeError, match="out of data"):
        train(tmp_path, 6, fail_at=4)
    run = load_run(tmp_path)
    assert run.manifest.status == "failed"
    assert run.manifest.failure is not None
    assert run.manifest.failure.message == "RuntimeError: out of data"
    assert (run.manifest.failure.step, run.manifest.failure.phase) == (4, Phase.FORWARD)
    assert len(run.ranks[0].steps) >= 4


def test_a_full_disk_loses_nothing_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a write fails the loop ends with the error, and earlier records are whole."""
    real_write = os.write
    budget = 40

    def write(descriptor: int, data: bytes) -> int:
        nonlocal budget
        budget -= 1
        if budget < 0:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data)

    monkeypatch.setattr("fsdp_doctor.runs.writer.os.write", write)
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path, 50)
    monkeypatch.undo()
    run = load_run(tmp_path)
    assert run.manifest.status == "failed"
    assert run.manifest.failure is not None
    assert run.manifest.failure.kind == "no_space"
    assert not [w for w in run.manifest.warnings if "skipped" in w]
    assert len(run.ranks[0].steps) >= 3
