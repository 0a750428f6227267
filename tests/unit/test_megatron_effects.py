"""Bytes and directions of Megatron's fields, against closed forms worked out by hand."""

from __future__ import annotations

import pytest
from megatron_cases import compare

from fsdp_doctor.config.effects import is_known
from fsdp_doctor.config.loaders import megatron_shell
from fsdp_doctor.model.config import ConfigDiff, Effect

LAYERS, HIDDEN, FFN, VOCAB, RANKS = 8, 1024, 4096, 32000, 8
BASE = (
    f"torchrun --nproc_per_node {RANKS} pretrain_gpt.py --num-layers {LAYERS}"
    f" --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads 16"
    f" --seq-length 2048 --micro-batch-size 2 --global-batch-size 32 --vocab-size {VOCAB}"
    " --position-embedding-type rope --untie-embeddings-and-output-weights --bf16"
)
LAYER = 4 * HIDDEN * HIDDEN + 2 * HIDDEN + 2 * HIDDEN * FFN
PARAMETERS = LAYERS * LAYER + 2 * VOCAB * HIDDEN
TOKENS = 2 * 2048


def difference(a: str, b: str) -> ConfigDiff:
    """Return the difference between two sets of flags on the base command."""
    return compare(megatron_shell, f"{BASE} {a}", f"{BASE} {b}", "0.19.0")


def effect(diff: ConfigDiff, key: str, category: str) -> Effect:
    """Return the effect of a changed field on a category."""
    change = next(change for change in diff.changed if change.key == key)
    return next(one for one in change.effects if one.category == category)


def test_distributed_optimizer_divides_twelve_bytes() -> None:
    """18 P becomes (6 + 12 / d) P: master weights and two moments are divided."""
    diff = difference("", "--use-distributed-optimizer")
    shard = -(-PARAMETERS // RANKS)
    found = effect(diff, "sharding.strategy", "optimizer_state")
    assert found.bytes == 12 * (shard - PARAMETERS)
    assert all(e.category != "gradients" for c in diff.changed for e in c.effects)


def test_bf16_gradients_cost_a_copy() -> None:
    """bf16 gradients halve the buffer, but the optimizer copies its shard to float32."""
    flags = "--use-distributed-optimizer"
    diff = difference(flags, f"{flags} --grad-reduce-in-bf16")
    assert effect(diff, "precision.grad", "gradients").bytes == -2 * PARAMETERS
    shard = -(-PARAMETERS // RANKS)
    assert effect(diff, "precision.grad", "optimizer_state").bytes == 4 * shard


def test_megatron_fsdp_divides_everything() -> None:
    """optim_grads_params keeps 1/d of weights and gradients, and a window of gathered ones."""
    fsdp = "--use-megatron-fsdp --suggested-communication-unit-size 30000000"
    diff = difference("--use-distributed-optimizer", fsdp)
    shard = -(-PARAMETERS // RANKS)
    found = effect(diff, "sharding.strategy", "parameters")
    assert found.bytes == 2 * (shard - PARAMETERS)
    effects = [e for c in diff.changed for e in c.effects if e.category == "unsharded_parameters"]
    assert sum(e.bytes or 0 for e in effects) == 2 * (2 * VOCAB * HIDDEN + 3 * LAYER)


def test_a_smaller_communication_unit_gathers_less() -> None:
    """Layers that fill half of it are gathered ahead, all of it may wait for reduction."""
    fsdp = "--use-megatron-fsdp --suggested-communication-unit-size"
    diff = difference(f"{fsdp} 80000000", f"{fsdp} 40000000")
    assert effect(diff, "comm.unit_elems", "unsharded_parameters").bytes == -2 * 2 * LAYER
    assert effect(diff, "comm.unit_elems", "unsharded_gradients").bytes == -2 * 40_000_000


def test_buckets_hold_memory_under_megatron_fsdp_only() -> None:
    """There they cut what lies outside of units; Megatron's DDP has one buffer of all buckets."""
    small, large = "--ddp-bucket-size 1000000", "--ddp-bucket-size 50000000"
    fsdp = "--use-megatron-fsdp --overlap-grad-reduce --data-parallel-sharding-strategy optim_grads"
    found = effect(
        difference(f"{fsdp} {small}", f"{fsdp} {large}"), "comm.bucket_bytes", "unsharded_gradients"
    )
    assert found.direction == "either"
    plain = difference(f"--overlap-grad-reduce {small}", f"--overlap-grad-reduce {large}")
    assert effect(plain, "comm.bucket_bytes", "communication").direction == "none"


def test_unfused_attention_keeps_the_scores() -> None:
    """5 a s^2 b bytes a layer appear with unfused attention."""
    diff = difference("", "--attention-backend unfused")
    expected = 5 * 16 * 2048 * TOKENS * LAYERS
    assert effect(diff, "attention.backend", "activations").bytes == expected


def test_full_recomputation_keeps_inputs() -> None:
    """Uniform recomputation keeps 2 s b h a layer, and one layer at work."""
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    diff = difference("", flags)
    layer = TOKENS * (18 * HIDDEN + 4 * FFN)
    expected = 2 * TOKENS * HIDDEN * LAYERS + layer - layer * LAYERS
    assert effect(diff, "recompute.mode", "activations").bytes == expected


def test_sequence_parallel_divides_norms() -> None:
    """10 s b h a layer become 10 s b h / t."""
    tensor = "--tensor-model-parallel-size 2"
    diff = difference(tensor, f"{tensor} --sequence-parallel")
    expected = -(10 * TOKENS * HIDDEN * LAYERS) // 2
    assert effect(diff, "parallel.sp", "activations").bytes == expected


def test_native_fused_loss_has_one_more_buffer() -> None:
    """The native fused cross entropy holds one more float32 copy of the logits."""
    diff = difference("", "--cross-entropy-loss-fusion")
    expected = 4 * TOKENS * VOCAB
    assert effect(diff, "loss.cross_entropy_fusion", "logits").bytes == expected


def test_micro_batch_scales_activations() -> None:
    """Twice the micro batch is twice the activations and logits."""
    diff = difference("--micro-batch-size 2", "--micro-batch-size 4")
    layer = TOKENS * (18 * HIDDEN + 4 * FFN)
    assert effect(diff, "batch.micro", "activations").bytes == layer * LAYERS
    assert effect(diff, "batch.micro", "logits").bytes == 6 * TOKENS * VOCAB


def test_offload_takes_a_share_of_the_state() -> None:
    """Half of the optimizer state leaves the device at a fraction of one half."""
    flags = "--use-distributed-optimizer --use-precision-aware-optimizer"
    diff = difference(flags, f"{flags} --optimizer-cpu-offload --optimizer-offload-fraction 0.5")
    shard = -(-PARAMETERS // RANKS)
    total = sum(e.bytes or 0 for c in diff.changed for e in c.effects)
    assert total == -6 * shard


def test_offload_leaves_main_weights_that_the_optimizer_does_not_keep() -> None:
    """Not precision-aware: only the moments leave; main weights stay, with a copy on the host."""
    flags = "--use-distributed-optimizer"
    diff = difference(flags, f"{flags} --optimizer-cpu-offload --optimizer-offload-fraction 0.5")
    shard = -(-PARAMETERS // RANKS)
    assert sum(e.bytes or 0 for c in diff.changed for e in c.effects) == -4 * shard


def test_tying_matters_on_one_stage_only() -> None:
    """With several stages the last one has an output layer of its own, tied or not."""
    tied = BASE.replace(" --untie-embeddings-and-output-weights", "")
    one = compare(megatron_shell, tied, BASE, "0.19.0")
    assert effect(one, "model.tied_embeddings", "parameters").bytes == 2 * VOCAB * HIDDEN
    pipeline = " --pipeline-model-parallel-size 2"
    several = compare(megatron_shell, tied + pipeline, BASE + pipeline, "0.19.0")
    assert [e for c in several.changed for e in c.effects] == []


@pytest.mark.parametrize(
    ("a", "b", "key", "way"),
    [
        ("", "--recompute-activations", "recompute.mode", "up"),
        ("", "--optimizer-cpu-offload", "offload.optimizer", "up"),
        ("", "--overlap-grad-reduce", "comm.overlap_grad_reduce", "down"),
        ("", "--fp8-format hybrid", "precision.fp8", "down"),
        ("--micro-batch-size 2", "--micro-batch-size 4", "batch.micro", "up"),
        ("", "--no-gradient-accumulation-fusion", "megatron.gradient_accumulation_fusion", "up"),
        ("", "--use-megatron-fsdp", "sharding.strategy", "up"),
    ],
)
def test_step_time(a: str, b: str, key: str, way: str) -> None:
    """Each change moves step time in the direction that its mechanism gives."""
    change = next(change for change in difference(a, b).changed if change.key == key)
    assert change.step_time is not None
    assert change.step_time.direction == way
    assert change.step_time.reason


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("--tensor-model-parallel-size 1", "--tensor-model-parallel-size 2"),
        ("--context-parallel-size 1", "--context-parallel-size 2"),
        ("", "--use-distributed-optimizer"),
        ("--use-distributed-optimizer", "--use-megatron-fsdp"),
        ("--num-layers 8", "--num-layers 12"),
    ],
)
def test_bytes_turn_their_sign_the_other_way(a: str, b: str) -> None:
    """What a change adds, its reverse takes away, to the byte."""

    def total(diff: ConfigDiff) -> int:
        return sum(e.bytes or 0 for c in diff.changed for e in c.effects)

    assert total(difference(a, b)) == -total(difference(b, a)) != 0


def test_every_effect_has_a_reason_and_a_source() -> None:
    """No effect stands without its mechanism and where that is from."""
    diff = difference("", "--use-megatron-fsdp --use-nccl-ub --tensor-model-parallel-size 2")
    effects = [e for c in diff.changed for e in c.effects]
    assert effects
    assert all(e.reason and e.source for e in effects)
    assert is_known("comm.double_buffer")


def test_rotary_positions_have_no_parameters() -> None:
    """More positions cost nothing with rotary embeddings, and weights with learned ones."""
    positions = "--max-position-embeddings 4096", "--max-position-embeddings 8192"
    rotary = difference(*positions)
    assert [e for c in rotary.changed for e in c.effects] == []
    learned = BASE.replace(" --position-embedding-type rope", "")
    a, b = (f"{learned} {flag}" for flag in positions)
    found = effect(compare(megatron_shell, a, b, "0.19.0"), "model.max_positions", "parameters")
    assert found.bytes == 2 * 4096 * HIDDEN
