"""``fsdp_doctor.record`` on a plain training loop, one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import user_models

from fsdp_doctor import record
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.memory import Category, Phase
from fsdp_doctor.model.run import RankSeries, Run
from fsdp_doctor.profiler.observe.cpu_tracker import CpuObserver
from fsdp_doctor.profiler.recorder import Recorder
from fsdp_doctor.profiler.recording import Recording, choose_device
from fsdp_doctor.runs import load_run

CPU = torch.device("cpu")
PHASES = frozenset({"data", "forward", "backward", "optimizer"})


class Loop:
    """A training loop of the test model, recorded as README does."""

    def __init__(self, directory: Path, named: frozenset[str] = PHASES) -> None:
        self.directory, self.named = directory, named
        self.model = user_models.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def record(self) -> Recording:
        """Begin to record."""
        return record(self.directory, model=self.model, optimizer=self.optimizer, name="mine")

    def step(self, recorder: Recorder, *, fail: BaseException | None = None) -> None:
        """Make one step; raise ``fail`` in its forward."""

        def phase(name: str) -> AbstractContextManager[None]:
            return recorder.phase(name) if name in self.named else nullcontext()

        with recorder.step():
            with phase("data"):
                batch = user_models.batch(4, 8, CPU)
            with phase("forward"):
                if fail is not None:
                    raise fail
                loss = user_models.loss(self.model(batch), batch)
            with phase("backward"):
                loss.backward()
            with phase("optimizer"):
                self.optimizer.step()
                self.optimizer.zero_grad()
            recorder.loss(loss)

    def run(self, steps: int, *, fail_at: int | None = None) -> tuple[Run, RankSeries]:
        """Make ``steps`` steps, and read the run back."""
        with self.record() as recorder:
            for number in range(steps):
                error = RuntimeError("out of data") if number == fail_at else None
                self.step(recorder, fail=error)
        return self.read()

    def read(self) -> tuple[Run, RankSeries]:
        """Read the run back: it and its only rank."""
        run = load_run(self.directory)
        return run, run.ranks[0]


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    """A loop with all its phases named."""
    return Loop(tmp_path / "run")


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Whatever a test does, no dispatch mode and no patched method may outlive it."""
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_plain_loop_is_recorded(loop: Loop) -> None:
    """Steps, phases, times, losses and the anatomy of the peak of a loop that is not ours."""
    run, series = loop.run(6)
    assert (run.manifest.name, run.manifest.status) == ("mine", "completed")
    assert (run.manifest.warnings, run.manifest.device_name is None) == ((), False)
    assert [s.kind for s in series.steps] == ["observed"] * 3 + ["timed"] * 3
    assert all(s.loss_finite and s.step_time_s for s in series.steps)
    assert [p.phase for p in series.steps[5].phases] == ["data", "forward", "backward", "optimizer"]
    assert series.anatomy is not None
    weights = sum(p.numel() * p.element_size() for p in loop.model.parameters())
    held = series.anatomy.phases[Phase.FORWARD].categories
    assert held[Category.PARAMETERS] == weights
    assert held[Category.OPTIMIZER_STATE] >= 2 * weights
    assert Phase.UNKNOWN not in series.anatomy.phases
    assert sorted(p.name for p in loop.directory.iterdir()) == ["rank-00000.jsonl", "run.json"]
    with pytest.raises(InputError, match="already holds a run"):
        Loop(loop.directory).run(1)


@pytest.mark.parametrize("named", [frozenset(), frozenset({"forward"})], ids=["none", "forward"])
def test_work_outside_of_phases_is_recorded(tmp_path: Path, named: frozenset[str]) -> None:
    """A loop without phases, or with one, has the memory and time of the rest as ``unknown``."""
    run, series = Loop(tmp_path, named).run(5)
    assert run.manifest.warnings == ()
    assert series.anatomy is not None
    assert series.anatomy.phases[Phase.UNKNOWN].peak_allocated_bytes > 0
    assert series.anatomy.categories[Category.PARAMETERS] > 0
    for step in series.steps:
        assert {p.phase for p in step.phases} == {*named, "unknown"}
        times = [p.time_s for p in step.phases]
        assert step.step_time_s == pytest.approx(sum(t for t in times if t is not None))
        memory = [p.peak.allocated_bytes for p in step.phases]
        assert all(memory) == (step.kind == "observed")


def test_a_nested_phase_interrupts_the_outer_one(loop: Loop) -> None:
    """Time and memory of a phase inside another are not counted twice."""
    with loop.record() as recorder, recorder.step(), recorder.phase("forward"):
        kept = torch.zeros(1 << 20)
        with recorder.phase("evaluation"):
            torch.zeros(1 << 21)
        del kept
    step = loop.read()[1].steps[0]
    forward, evaluation = sorted(step.phases, key=lambda p: p.phase != "forward")
    assert forward.peak.allocated_bytes is not None
    assert evaluation.peak.allocated_bytes == forward.peak.allocated_bytes + (1 << 23)
    assert step.step_time_s is not None
    assert step.step_time_s >= (forward.time_s or 0) + (evaluation.time_s or 0)


def test_an_observer_that_fails_leaves_a_warning(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of our own in a hook ends the observation with a warning, and the loop goes on."""

    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError("no such tensor")

    with loop.record() as recorder:
        loop.step(recorder)
        monkeypatch.setattr(CpuObserver, "born", broken)
        loop.step(recorder)
        assert not recorder.observing
        loop.step(recorder)
    run, series = loop.read()
    assert run.manifest.status == "completed"
    assert series.anatomy is None
    (warning,) = run.manifest.warnings
    assert "no longer observed: ZeroDivisionError: no such tensor" in warning
    assert [s.kind for s in series.steps] == ["observed", "observed", "timed"]


def test_an_unknown_phase_is_named(loop: Loop) -> None:
    """A phase of another name is refused with the names there are."""
    with (
        pytest.raises(InputError, match=r"no phase 'loss'.*known phases: init, .*forward"),
        loop.record() as recorder,
        recorder.step(),
        recorder.phase("loss"),
    ):
        pass
    assert loop.read()[0].manifest.status == "failed"


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_short_loop_ends_the_observation(loop: Loop, steps: int) -> None:
    """With fewer steps than are observed nothing of the observer stays behind."""
    run, series = loop.run(steps)
    assert run.manifest.status == "completed"
    assert (series.anatomy is None) == (steps == 0)
    assert len(run.manifest.warnings) == min(steps, 1)


def test_the_device_is_found_by_all_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloaded parameters do not make it a CPU job when CUDA is in use; an argument decides."""
    model = user_models.build()
    assert choose_device(model, None) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert choose_device(model, None) == CPU
    assert choose_device(model, "cuda") == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert choose_device(model, None) == torch.device("cuda", 3)
    assert choose_device(model, "cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    assert choose_device(model, None) == torch.device("cuda", 3)


def test_time_between_steps_is_recorded(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow loader between two steps shows as the gap before the second."""
    clock = [100.0]
    monkeypatch.setattr("fsdp_doctor.profiler.recorder.time.perf_counter", lambda: clock[0])
    with loop.record() as recorder:
        loop.step(recorder)
        clock[0] += 2.5
        loop.step(recorder)
    assert [s.gap_s for s in loop.read()[1].steps] == [None, 2.5]


def test_phases_outside_of_steps_stay_outside(loop: Loop) -> None:
    """Evaluation between steps belongs to no step, and every one keeps its own time."""
    with loop.record() as recorder:
        with recorder.phase("load"):
            pass
        for _ in range(4):
            loop.step(recorder)
            with recorder.phase("evaluation"):
                torch.zeros(1 << 20)
    series = loop.read()[1]
    assert [p.phase for p in series.setup] == ["load"]
    assert [p.phase for p in series.outside] == ["evaluation"] * 4
    assert all(p.time_s is not None for p in (*series.setup, *series.outside))
    assert all(p.phase != "evaluation" for s in series.steps for p in s.phases)
    assert series.anatomy is not None
    assert Phase.EVALUATION not in series.anatomy.phases


def test_an_exception_is_recorded_and_passed_on(loop: Loop) -> None:
    """The loop's exception reaches the caller; the run says where it happened."""
    with pytest.raises(RuntimeError, match="out of data"):
        loop.run(6, fail_at=4)
    run, series = loop.read()
    assert run.manifest.status == "failed"
    assert run.manifest.failure is not None
    assert run.manifest.failure.message == "RuntimeError: out of data"
    assert (run.manifest.failure.step, run.manifest.failure.phase) == (4, Phase.FORWARD)
    assert [s.kind for s in series.steps] == ["observed"] * 3 + ["timed"] * 2
    assert all(s.step_time_s for s in series.steps[:4])
    assert [p.phase for p in series.steps[4].phases] == ["data", "forward"]


def test_an_observed_step_that_fails_has_its_memory(loop: Loop) -> None:
    """The unfinished step is an observed one, with the failing phase's memory and no resident."""
    with pytest.raises(RuntimeError, match="out of data"):
        loop.run(6, fail_at=1)
    series = loop.read()[1]
    assert [s.kind for s in series.steps] == ["observed", "observed"]
    failing = series.steps[1].phases[-1]
    assert failing.phase is Phase.FORWARD
    anatomy = series.anatomy
    assert anatomy is not None
    assert (anatomy.step, anatomy.peak_phase, anatomy.resident) == (1, Phase.FORWARD, {})
    assert anatomy.peak_allocated_bytes == failing.peak.allocated_bytes
    assert sum(anatomy.categories.values()) == anatomy.peak_allocated_bytes


def test_a_step_that_the_loop_gave_up_keeps_its_number(loop: Loop) -> None:
    """A loop that catches an error and goes on is recorded on, without mixing two steps."""
    with loop.record() as recorder:
        for number in range(5):
            try:
                loop.step(recorder, fail=MemoryError("caught") if number == 1 else None)
            except MemoryError:
                loop.optimizer.zero_grad()
    series = loop.read()[1]
    assert [s.step for s in series.steps] == [0, 1, 2, 3, 4]
    assert [s.step_time_s is None for s in series.steps] == [False, True, False, False, False]


def test_ctrl_c_is_an_interruption(loop: Loop) -> None:
    """KeyboardInterrupt between steps ends the run as interrupted, at no step."""

    def interrupted(recorder: Recorder) -> None:
        loop.step(recorder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), loop.record() as recorder:
        interrupted(recorder)
    run = loop.read()[0]
    assert run.manifest.status == "interrupted"
    assert run.manifest.failure is not None
    assert (run.manifest.failure.kind, run.manifest.failure.step) == ("interrupted", None)


def test_every_rank_refuses_a_used_directory(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank other than 0 appends to no file of an earlier run."""
    loop.directory.mkdir()
    (loop.directory / "rank-00001.jsonl").write_text("")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(InputError, match="already holds a run"):
        loop.record()


def test_a_full_disk_loses_nothing_recorded(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
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
        loop.run(50)
    monkeypatch.undo()
    run, series = loop.read()
    assert run.manifest.status == "failed"
    assert run.manifest.failure is not None
    assert run.manifest.failure.kind == "no_space"
    assert not [w for w in run.manifest.warnings if "skipped" in w]
    assert len(series.steps) >= 3


def test_a_disk_that_is_full_while_observing(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The observer is taken down even when the failure itself cannot be written."""

    def fill(recorder: Recorder) -> None:
        loop.step(recorder)
        monkeypatch.setattr("fsdp_doctor.runs.writer.os.write", write)
        loop.step(recorder)

    def write(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), loop.record() as recorder:
        fill(recorder)
    assert [s.kind for s in loop.read()[1].steps] == ["observed"]
