"""The CPU observer on two gloo ranks: categories, counts from shapes, no trace left behind."""

# ruff: noqa: D103 - the names say it

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from test_tracker_model import BATCH, CASES, TOKENS, VOCAB, Case, on_ranks, train  # noqa: E402
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # noqa: E402

from fsdp_doctor.model.memory import Anatomy, Category, Phase  # noqa: E402
from fsdp_doctor.profiler.observe import make_observer  # noqa: E402

CPU = torch.device("cpu")
LOGITS = BATCH * TOKENS * VOCAB * 4
PARAMETERS = 263040 * 4
"""Bytes of the small GPT in float32."""


def observe(case: Case) -> Anatomy:
    observer = make_observer(CPU)
    observer.start()
    model, _ = train(case, observer, CPU)
    anatomy = observer.finish(2, None)
    assert not _get_current_dispatch_mode_stack()
    assert "resize_" not in torch.UntypedStorage.__dict__
    for module in model.modules():
        names = {getattr(h, "__qualname__", "") for h in module._forward_pre_hooks.values()}
        assert "ModuleWatcher._before" not in names
    return anatomy


@pytest.mark.parametrize("case", CASES, ids=str)
def test_categories_sum_and_agree_with_shapes(case: Case, tmp_path: Path) -> None:
    for anatomy in on_ranks(lambda _: observe(case), tmp_path):
        assert anatomy.incomplete is None
        assert list(anatomy.phases) == ["init", "wrap", "data", "forward", "backward", "optimizer"]
        for phase in anatomy.phases.values():
            assert sum(phase.categories.values()) == phase.peak_allocated_bytes
            assert phase.peak_allocated_bytes >= phase.end_allocated_bytes
        assert sum(anatomy.categories.values()) == anatomy.peak_allocated_bytes
        assert anatomy.peak_phase is Phase.BACKWARD
        check_identity(case, anatomy)
        check_mechanisms(case, anatomy)


def check_identity(case: Case, anatomy: Anatomy) -> None:
    """Parameters, gradients and optimizer state are, to the byte, what the shapes say."""
    in_optimizer = anatomy.phases["optimizer"].categories
    for name in ("parameters", "gradients", "optimizer_state"):
        assert in_optimizer[name] == anatomy.expected_bytes[name]
    padded = 1.01 * PARAMETERS / (1 if case.strategy == "ddp" else 2)
    assert padded / 1.02 < anatomy.expected_bytes["parameters"] < padded
    assert anatomy.resident["optimizer_state"] == anatomy.expected_bytes["optimizer_state"]
    assert (
        anatomy.expected_bytes["optimizer_state"] - 2 * anatomy.expected_bytes["parameters"] < 999
    )
    assert anatomy.resident["buffers"] == TOKENS * 64 * 4
    assert sum(p.categories.get("unknown", 0) for p in anatomy.phases.values()) == 0


def check_mechanisms(case: Case, anatomy: Anatomy) -> None:
    """Every strategy shows what it is known for."""
    forward, backward = (anatomy.phases[p].categories for p in ("forward", "backward"))
    if case.strategy == "ddp":
        assert forward["logits"] >= LOGITS
        assert ("communication" in forward) is not case.bucket_view
    else:
        assert forward["unsharded_parameters"] > 0
        assert backward["unsharded_gradients"] > 0
    if case.autocast:
        assert forward["unsharded_parameters"] > PARAMETERS // 4
    if case.accumulation > 1 and case.strategy != "ddp":
        assert backward["unsharded_gradients"] >= PARAMETERS
    tops = [(t.category, t.subcategory) for t in anatomy.top_allocations]
    if case.checkpointing:
        assert (Category.ACTIVATIONS, "recomputed") in tops
    modules = {t.module for t in anatomy.top_allocations}
    assert any(m is not None and m.startswith("blocks.") for m in modules)


def test_the_head_is_found_whatever_its_name() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.vocabulary = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4096)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.vocabulary(torch.relu(self.body(x)))

    observer = make_observer(CPU)
    observer.start()
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters())
    observer.watch(model, optimizer)
    for step in range(2):
        observer.begin_phase(step, Phase.FORWARD, 0)
        loss = model(torch.ones(16, 8)).square().mean()
        observer.end_phase()
        observer.begin_phase(step, Phase.BACKWARD, 0)
        loss.backward()
        observer.end_phase()
        observer.begin_phase(step, Phase.OPTIMIZER, 0)
        optimizer.step()
        optimizer.zero_grad()
        observer.end_phase()
    anatomy = observer.finish(1, None)
    assert anatomy.phases["forward"].categories["logits"] >= 2 * 16 * 4096 * 4


def test_abort_describes_the_unfinished_step() -> None:
    observer = make_observer(CPU)
    assert observer.abort() is None
    observer.start()
    observer.begin_phase(0, Phase.FORWARD, 0)
    kept = torch.ones(1000)
    anatomy = observer.abort()
    assert anatomy is not None
    assert anatomy.step == 0
    assert anatomy.peak_allocated_bytes == kept.nbytes
    assert anatomy.categories == {"activations": 4000}
    assert anatomy.incomplete is not None
    assert "forward" in anatomy.incomplete
    assert not _get_current_dispatch_mode_stack()


def test_counters_of_a_phase() -> None:
    observer = make_observer(CPU)
    observer.start()
    observer.begin_phase(0, Phase.DATA, 0)
    kept = torch.ones(100)
    gone = torch.ones(200)
    del gone
    end, peak = observer.end_phase()
    observer.abort()
    assert (end.allocated_bytes, peak.allocated_bytes) == (400, 1200)
    assert end.reserved_bytes is None
    assert kept.nbytes == 400
