"""The CUDA observer on real devices: the history must be the device's own counters."""
# ruff: noqa: D102, D103 - the names say it

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_tracker_model import CASES, Case, on_ranks, train  # noqa: E402

from fsdp_doctor.model.memory import Anatomy, Phase  # noqa: E402
from fsdp_doctor.profiler.observe import make_observer  # noqa: E402

DEVICES = torch.cuda.device_count()  # by NVML: does not initialise CUDA, so ranks can be forked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES == 0, reason="no CUDA device"),
]

GPU_CASES = (Case("none"), *CASES)


class Counting:
    """Passes everything on, and reads the device's peak at the end of each phase as a recorder."""

    def __init__(self, observer: Any, device: Any) -> None:
        self._observer, self._device = observer, device
        self._phase, self._step = Phase.UNKNOWN, -1
        self.peaks: dict[str, int] = {}

    def begin_phase(self, step: int, phase: Phase, microbatch: int) -> None:
        if step != self._step:
            self.peaks = {}
        self._phase, self._step = phase, step
        self._observer.begin_phase(step, phase, microbatch)

    def end_phase(self) -> None:
        peak = torch.cuda.max_memory_allocated(self._device)
        self.peaks[self._phase.value] = max(self.peaks.get(self._phase.value, 0), peak)
        end, seen = self._observer.end_phase()
        assert end.allocated_bytes is None
        assert seen.allocated_bytes is None
        torch.cuda.reset_peak_memory_stats(self._device)

    def watch(self, model: Any, optimizer: Any) -> None:
        self._observer.watch(model, optimizer)

    def inputs(self, batch: Any) -> None:
        self._observer.inputs(batch)


def observe(case: Case, rank: int) -> tuple[Anatomy, dict[str, int]]:
    device = torch.device("cuda", rank)
    observer = make_observer(device)
    observer.start()
    counting = Counting(observer, device)
    keep = train(case, counting, device)
    anatomy = observer.finish(2, counting.peaks)
    del keep
    return anatomy, counting.peaks


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_history_is_what_the_device_counted(case: Case, tmp_path: Path) -> None:
    ranks = min(DEVICES, 2)
    for anatomy, peaks in on_ranks(lambda r: observe(case, r), tmp_path, ranks, "nccl"):
        assert anatomy.incomplete is None
        assert {name: anatomy.phases[name].peak_allocated_bytes for name in peaks} == peaks
        for phase in anatomy.phases.values():
            assert sum(phase.categories.values()) == phase.peak_allocated_bytes
        assert anatomy.categories.get("unknown", 0) <= 0.02 * anatomy.peak_allocated_bytes
        optimizer = anatomy.phases["optimizer"].categories
        for name in ("parameters", "gradients", "optimizer_state"):
            assert optimizer[name] == anatomy.expected_bytes[name]
        modules = {top.module for top in anatomy.top_allocations}
        assert any(name is not None and name.startswith("blocks.") for name in modules)


def test_out_of_memory_is_described(tmp_path: Path) -> None:
    def work(rank: int) -> Anatomy | None:
        device = torch.device("cuda", rank)
        observer = make_observer(device)
        observer.start()
        observer.begin_phase(0, Phase.FORWARD, 0)
        kept = torch.ones(1 << 20, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 50, device=device, dtype=torch.uint8)
        anatomy = observer.abort()
        assert kept.nbytes == 4 << 20
        return anatomy

    (anatomy,) = on_ranks(work, tmp_path, 1, "nccl")
    assert anatomy is not None
    assert anatomy.categories == {"activations": 4 << 20}
    assert anatomy.incomplete is not None
    assert "failed" in anatomy.incomplete
