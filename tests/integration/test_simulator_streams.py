"""On which streams and devices a simulated rank's memory lies, beside what H200s recorded."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest

pytest.importorskip("torch")

from fsdp_doctor.config.spec import spec_from_mapping
from fsdp_doctor.simulator.short_cut import Simulated


def simulated(config: dict[str, Any], keep: Callable[[Simulated], Any]) -> Any:
    """Return what ``keep`` takes from a dry run of two layers on one of four ranks."""
    import torch._dynamo  # noqa: F401 (fake tensors import it: once for all)

    model = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128}
    raw = {"name": "tiny", "world_size": 4, "workload": {"model": model}, "config": config}
    context = get_context("fork")
    answers, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, raw, keep))
    process.start()
    found = answers.recv()
    process.join()
    return found


def _child(sender: Connection, raw: dict[str, Any], keep: Callable[[Simulated], Any]) -> None:
    from fsdp_doctor.simulator.dry_run import dry_run

    spec = spec_from_mapping(raw, "spec")
    sender.send(keep(dry_run(spec, rank=0, world_size=4, steps=2, workspace_bytes=32 << 20)))


def made_by(operator: str) -> Callable[[Simulated], list[int]]:
    """Streams of the blocks that an operator made in the last backward pass, without repeats."""

    def keep(run: Simulated) -> list[int]:
        found = [
            block.stream
            for block in run.log.allocations
            if block.step == 1 and block.phase == "backward" and block.operator == operator
        ]
        return sorted(set(found))

    return keep


def test_the_gradient_of_a_flat_parameter_lies_on_the_stream_that_gathered_it() -> None:
    """Autograd runs a node where its forward ran; computing stays on stream 0. Six jobs recorded on
    an H200 gather and put gradients together on stream 1.
    """
    config = {"strategy": "fsdp1"}
    assert simulated(config, made_by("aten.resize_")) == [1]
    assert 1 in simulated(config, made_by("aten.cat.default"))
    assert simulated(config, made_by("aten.mm.default")) == [0]


def test_a_buffer_of_megatron_fsdp_is_gathered_on_a_stream_of_its_own() -> None:
    """And the cache is emptied when the model was cut, as a recorded H200 did."""
    pytest.importorskip("megatron.core")
    config = {
        "strategy": "megatron",
        "megatron": {
            "dist": {"use_megatron_fsdp": True},
            "ddp": {
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "data_parallel_sharding_strategy": "optim_grads_params",
            },
            "model": {"bf16": True, "normalization": "RMSNorm", "add_bias_linear": False},
            "optimizer": {"lr": 1e-4},
        },
    }

    def keep(run: Simulated) -> tuple[list[int], bool]:
        gathered = {
            block.stream
            for block in run.log.allocations
            if any("async_bucket_gather" in frame for frame in block.frames)
        }
        return sorted(gathered), bool(run.streams.releases)

    assert simulated(config, keep) == ([1], True)


def test_an_optimizer_on_the_host_leaves_its_state_there() -> None:
    """Megatron's moments take GPU memory, unless all weights are updated on the host."""
    pytest.importorskip("megatron.core")

    def moments(run: Simulated) -> int:
        return sum(
            block.requested_bytes
            for block in run.log.allocations
            if any("adam.py" in frame and "_init_group" in frame for frame in block.frames)
        )

    def config(*, offload: bool) -> dict[str, Any]:
        host = {"optimizer_cpu_offload": offload, "optimizer_offload_fraction": float(offload)}
        return {
            "strategy": "megatron",
            "megatron": {
                "ddp": {"use_distributed_optimizer": True},
                "model": {"bf16": True, "normalization": "RMSNorm", "add_bias_linear": False},
                "optimizer": {"lr": 1e-4, **host},
            },
        }

    assert simulated(config(offload=False), moments) > 200_000
    assert simulated(config(offload=True), moments) == 0
