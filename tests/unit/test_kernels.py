"""Blocks that only the allocator sees: what CUDA kernels allocate inside themselves."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def test_a_softmax_backward_holds_the_product_of_gradient_and_output() -> None:
    """One block as large as the output, in the wider of both types; a log-softmax has none."""
    from fsdp_doctor.simulator.kernels import scratch

    grad = torch.zeros(2, 16, 64, 64, dtype=torch.bfloat16)
    output = torch.zeros(2, 16, 64, 64)
    softmax = torch.ops.aten._softmax_backward_data.default
    assert scratch(softmax, (grad, output, -1, torch.float32)) == [output.nbytes]
    log_softmax = torch.ops.aten._log_softmax_backward_data.default
    assert scratch(log_softmax, (grad, output, -1, torch.float32)) == []


def test_attention_backward_takes_what_an_h200_recorded() -> None:
    """Two shapes with cuDNN (one workspace), one with the memory-efficient kernel in float32: a
    product, its sum, the sum made contiguous, then tiles with locks.
    """
    from fsdp_doctor.simulator.kernels import scratch

    aten = torch.ops.aten
    cudnn = aten._scaled_dot_product_cudnn_attention_backward.default
    for shape, recorded in (((2, 16, 512, 64), 4260096), ((4, 16, 1024, 128), 33816832)):
        query = torch.zeros(shape, dtype=torch.bfloat16, device="meta")
        assert scratch(cudnn, (query, query)) == [recorded]
    efficient = aten._scaled_dot_product_efficient_attention_backward.default
    query = torch.zeros(2, 16, 512, 64, device="meta")
    recorded = [4194304, 65536, 65536, -2, -1, 4198400]
    assert scratch(efficient, (query, query)) == recorded


def test_a_gradient_in_another_order_is_copied_before_the_embedding_sums_it() -> None:
    """The copy is made before the output (step 0)."""
    from fsdp_doctor.simulator.kernels import scratch

    backward = torch.ops.aten.embedding_dense_backward.default
    grad = torch.zeros(512, 2, 64, dtype=torch.bfloat16)
    indices = torch.zeros(512, 2, dtype=torch.int64)
    assert scratch(backward, (grad, indices, 64)) == []
    assert scratch(backward, (grad.transpose(0, 1), indices, 64)) == [grad.nbytes, 0]


def test_many_indices_of_an_embedding_are_sorted_and_summed_in_parts() -> None:
    """As an H200 recorded it for 4096 rows of 2048: the two lists of sorted indices go last."""
    from fsdp_doctor.simulator.kernels import scratch

    backward = torch.ops.aten.embedding_dense_backward.default
    grad = torch.zeros(4, 1024, 2048, device="meta")
    indices = torch.zeros(4, 1024, dtype=torch.int64, device="meta")
    steps = scratch(backward, (grad, indices, 16000))
    each = 32768
    assert steps[:5] == [each, each, each, -3, 0]
    assert steps[5:14] == [each, 8, each, -6, each, each, 8, 36040, 36904960]
    assert steps[14:] == [-11, -10, -9, -8, -7, -5, -4]


def test_fsdp2_copies_take_the_tables_that_h200s_recorded() -> None:
    """Embedding, norm and head of 32000 words in float32 over 8 ranks, then a layer; two ranks in
    bfloat16 with float32 gradients.
    """
    pytest.importorskip("torch.distributed.fsdp")  # registers the operators
    from fsdp_doctor.simulator.kernels import copy_scratch

    out_of = torch.ops.fsdp.split_with_sizes_copy.default
    cat = torch.ops.fsdp.chunk_cat.default
    words, width, ffn = 32000, 2048, 5632
    root = [(words, width), (width,), (words, width)]
    matrices = [(width, width)] * 4 + [(ffn, width)] * 3
    layer = [*matrices, (width,), (width,)]
    bfloat16, float32 = torch.bfloat16, torch.float32
    recorded = (
        (root, 8, float32, 32112, 256168),
        (layer, 8, float32, 20408, 100816),
        (root, 2, bfloat16, 32112, 1024176),
        (layer, 2, bfloat16, 33792, 401888),
    )
    for shapes, ranks, dtype, gathered_table, reduced_table in recorded:
        grads = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
        sizes = [grad.numel() // ranks for grad in grads]
        gathered = torch.empty(ranks, sum(sizes), dtype=dtype, device="meta")
        outs = [grad.view(ranks, -1) for grad in grads]
        steps = copy_scratch(out_of, (gathered, sizes), {"dim": 1, "out": outs})
        assert steps == [gathered_table]
        reduced = torch.empty(ranks, sum(sizes), dtype=float32, device="meta")
        steps = copy_scratch(cat, (grads,), {"dim": 0, "num_chunks": ranks, "out": reduced})
        assert steps == [reduced_table]


def test_copies_that_are_not_fused_have_no_table() -> None:
    """The fused copy knows one cast, of bfloat16 to float32; other operators have none."""
    pytest.importorskip("torch.distributed.fsdp")
    from fsdp_doctor.simulator.kernels import copy_scratch

    cat = torch.ops.fsdp.chunk_cat.default
    grads = [torch.empty(64, 64, dtype=torch.float16, device="meta")]
    reduced = torch.empty(2, 2048, device="meta")
    assert copy_scratch(cat, (grads, 0, 2), {"out": reduced}) == []
    assert copy_scratch(torch.ops.aten.add_.Tensor, (reduced, reduced), {}) == []
