"""What a dry run counts for the first guess of a step's time, against closed forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from fsdp_doctor.model.work import StepWork
from fsdp_doctor.simulator.many import Simulations
from fsdp_doctor.simulator.request import DryRunRequest

LAYERS, HIDDEN, FFN, VOCAB, HEADS, TOKENS = 2, 64, 256, 128, 4, 32
BLOCK = 4 * HIDDEN**2 + 3 * HIDDEN * FFN
"""Parameters of a block's matrices."""
POLICY = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}


Count = Callable[[dict[str, Any]], StepWork]


@pytest.fixture(scope="module")
def count() -> Iterator[Count]:
    """Count the steady step of a small model on four ranks."""
    model = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "ffn": FFN, "vocab": VOCAB}
    workload = {"model": model, "sequence_length": TOKENS}
    with Simulations() as server:

        def counted(config: dict[str, Any]) -> StepWork:
            raw = {"name": "tiny", "world_size": 4, "workload": workload, "config": config}
            request = DryRunRequest(spec=raw, rank=0, steps=2, workspace_bytes=0)
            work = server.simulate(request).work
            assert work is not None
            return work

        yield counted


def test_fsdp2_counts_match_closed_forms(count: Count) -> None:
    """Matmuls 6 FLOPs a parameter and token, causal attention half of its square; two gathers of
    the blocks in bfloat16, and one reduction in float32.
    """
    config = {"strategy": "fsdp2", "fsdp2": {"mp_policy": POLICY, "reshard_after_forward": True}}
    work = count(config)
    matmuls = sum(k.flops * k.count for k in work.kernels if k.kind == "matmul")
    assert matmuls == 6 * TOKENS * (LAYERS * BLOCK + HIDDEN * VOCAB)
    attention = sum(k.flops * k.count for k in work.kernels if k.kind == "attention")
    products = 2 + 5  # forward; backward, which computes the scores again
    assert attention == products * LAYERS * HIDDEN * TOKENS**2
    parameters = LAYERS * (BLOCK + 2 * HIDDEN) + 2 * HIDDEN * VOCAB + HIDDEN
    sent = {
        kind: sum(c.payload_bytes * c.count for c in work.collectives if c.kind == kind)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    assert sent == {
        "all_gather": 2 * 2 * parameters,
        "reduce_scatter": 4 * parameters,
        "all_reduce": 0,
    }
    assert all(c.group_size == 4 and c.stride == 1 for c in work.collectives)
    assert not work.copies


def test_ddp_reduces_every_gradient_once_for_each_synchronised_micro_step(count: Count) -> None:
    """Two micro steps, the last one synchronised: every float32 gradient is reduced once."""
    work = count(
        {"strategy": "ddp", "gradient_accumulation": {"steps": 2, "sync": "last_microbatch"}}
    )
    reduced = sum(c.payload_bytes * c.count for c in work.collectives if c.kind == "all_reduce")
    parameters = LAYERS * (BLOCK + 2 * HIDDEN) + 2 * HIDDEN * VOCAB + HIDDEN
    assert reduced == pytest.approx(4 * parameters, rel=0.001)
    matmuls = sum(k.flops * k.count for k in work.kernels if k.kind == "matmul")
    assert matmuls == 2 * 6 * TOKENS * (LAYERS * BLOCK + HIDDEN * VOCAB)


def test_offload_is_counted_as_copies_and_work_on_the_host(count: Count) -> None:
    """Hybrid offloaded parameters come and gradients go over PCIe; replicas are two ranks apart."""
    work = count(
        {
            "strategy": "fsdp2",
            "fsdp2": {"offload_policy": {}, "mesh": {"replicate": 2, "shard": 2}},
            "optimizer": {"max_grad_norm": 1.0},
        }
    )
    places = {item.place for item in work.copies if item.total_bytes}
    assert places == {"to_gpu", "to_host", "host"}
    groups = {(c.kind, c.group_size, c.stride) for c in work.collectives}
    assert ("all_reduce", 2, 2) in groups
    assert ("all_gather", 2, 1) in groups
    assert any(c.phase == "optimizer" for c in work.collectives)  # the gradients' norm
