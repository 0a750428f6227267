"""Blocks that only the allocator sees: what CUDA kernels allocate inside themselves."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def test_a_softmax_backward_holds_the_product_of_gradient_and_output() -> None:
    """One block as large as the output, in the wider of both types; a log-softmax has none."""
    from fsdp_doctor.simulator.kernels import scratch_bytes

    grad = torch.zeros(2, 16, 64, 64, dtype=torch.bfloat16)
    output = torch.zeros(2, 16, 64, 64)
    softmax = torch.ops.aten._softmax_backward_data.default
    assert scratch_bytes(softmax, (grad, output, -1, torch.float32)) == [output.nbytes]
    log_softmax = torch.ops.aten._log_softmax_backward_data.default
    assert scratch_bytes(log_softmax, (grad, output, -1, torch.float32)) == []
