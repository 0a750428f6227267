"""Time of a profiled step, divided: on real CPU steps, and on hand-made CUDA traces."""
# ruff: noqa: D103 - the names say it

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from test_tracker_model import Case, NoObserver, train  # noqa: E402

from fsdp_doctor.model.memory import Phase  # noqa: E402
from fsdp_doctor.model.run import TimeBreakdown  # noqa: E402
from fsdp_doctor.profiler.observe.kernel_profile import (  # noqa: E402
    KernelProfile,
    Span,
    break_down,
)


def check(parts: tuple[TimeBreakdown, ...]) -> None:
    for part in parts:
        assert 0 <= part.exposed_communication_s <= part.communication_s
        busy = part.kernel_s + part.exposed_communication_s
        assert busy <= part.wall_s + 1e-9
        assert part.idle_s <= part.wall_s - busy + 1e-9


def test_a_cpu_step() -> None:
    model, optimizer = train(Case("none"), NoObserver(), torch.device("cpu"), steps=1)
    profile = KernelProfile(torch.device("cpu"))
    tokens = torch.randint(0, 512, (2, 32))
    with profile:
        with profile.phase(Phase.FORWARD):
            loss = model(tokens).float().mean()
        with profile.phase(Phase.BACKWARD):
            loss.backward()
        with profile.phase(Phase.OPTIMIZER):
            optimizer.step()
    parts = profile.breakdown()
    assert [p.phase for p in parts] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    check(parts)
    assert all(p.kernel_s > 0.05 * p.wall_s for p in parts)
    assert all(p.communication_s == 0 for p in parts)


def test_an_exception_passes_through() -> None:
    profile = KernelProfile(torch.device("cpu"))
    with pytest.raises(KeyError), profile:
        raise KeyError
    assert profile.breakdown() == ()


def test_cuda_overlap() -> None:
    mark = "fsdp_doctor_phase:"
    spans = [
        Span(mark + "forward", 0, 1000, 1, False),
        Span("aten::mm", 10, 20, 1, False),
        Span("gemm", 100, 400, 7, True),
        Span("gemm2", 300, 500, 8, True),
        Span("ncclDevKernel_AllGather_RING_LL", 350, 700, 9, True),
        Span("Memcpy HtoD (Pinned -> Device)", 650, 800, 7, True),
        Span(mark + "backward", 1000, 2000, 1, False),
        Span("gemm", 1000, 2000, 7, True),
        Span(mark + "forward", 2000, 2100, 1, False),
    ]
    forward, backward = break_down(spans, on_cuda=True)
    check((forward, backward))
    assert forward.wall_s == pytest.approx(1100e-9)
    assert forward.kernel_s == pytest.approx(400e-9)
    assert forward.communication_s == pytest.approx(350e-9)
    assert forward.exposed_communication_s == pytest.approx(200e-9)
    assert forward.copy_s == pytest.approx(150e-9)
    assert forward.idle_s == pytest.approx(400e-9)
    assert backward.idle_s == 0


def test_gloo_threads_are_communication() -> None:
    spans = [
        Span("fsdp_doctor_phase:backward", 0, 100, 1, False),
        Span("aten::linear", 0, 50, 1, False),
        Span("aten::mm", 10, 50, 1, False),
        Span("gloo:all_reduce", 40, 80, 2, False),
        Span("aten::div_", 70, 75, 2, False),
    ]
    (part,) = break_down(spans, on_cuda=False)
    assert part.kernel_s == pytest.approx(50e-9)
    assert part.communication_s == pytest.approx(40e-9)
    assert part.exposed_communication_s == pytest.approx(30e-9)
