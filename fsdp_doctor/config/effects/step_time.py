"""In which direction a change moves step time, and why. Signs only: no time is predicted here."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_doctor.config.effects.base import (
    EffectContext,
    TimeRule,
    compare_order,
    opposite,
    rises,
)
from fsdp_doctor.model.config import ConfigChange, Direction, StepTimeEffect

Way = Callable[[ConfigChange], Direction]


def _rule(way: Direction | Way, reason: str) -> TimeRule:
    def rule(change: ConfigChange, context: EffectContext) -> StepTimeEffect:  # noqa: ARG001
        direction = way(change) if callable(way) else way
        return StepTimeEffect(direction=direction, reason=reason)

    return rule


def _falls(change: ConfigChange) -> Direction:
    return opposite(rises(change))


def _ordered(*order: object) -> Way:
    def way(change: ConfigChange) -> Direction:
        return compare_order(change.a.value, change.b.value, order)

    return way


def _reshard(change: ConfigChange) -> Direction:
    if change.b.value is False:
        return "down"
    return "up" if change.a.value is False else "either"


def _clip(change: ConfigChange) -> Direction:
    if change.a.set == change.b.set:
        return "none"
    return "up" if change.b.set else "down"


def _zero_flip(change: ConfigChange) -> Direction:
    return "none" if bool(change.a.value) == bool(change.b.value) else rises(change)


def _by_width(change: ConfigChange) -> Direction:
    low = ("bfloat16", "float16")
    if change.a.value in low and change.b.value in low:
        return "either"
    return "down" if change.b.value in low else "up"


_RECOMPUTE = _ordered("none", "selective", "full")
_SIZE = _rule(rises, "more to compute and to communicate")

TIMES: dict[str, TimeRule] = {
    "sharding.impl": _rule("either", "other collectives, other overlap"),
    "sharding.strategy": _rule(
        _ordered("none", "optim_grads_params"),
        "sharded parameters are gathered in forward and in backward",
    ),
    "sharding.reshard_after_forward": _rule(
        _reshard, "resharding costs one all-gather of the parameters per backward"
    ),
    "sharding.reshard_after_forward[root]": _rule(
        _reshard, "resharding the root costs one more all-gather of it per backward"
    ),
    "sharding.shard_size": _rule("either", "collectives over another group"),
    "sharding.replicate_size": _rule("either", "gradients are all-reduced over the replicas"),
    "sharding.unit": _rule("either", "few large or many small collectives"),
    "sharding.blocks_per_unit": _rule("either", "few large or many small collectives"),
    "world.size": _rule("either", "collectives over another number of ranks"),
    "comm.bucket_view": _rule(_falls, "gradients need not be copied into the buckets and back"),
    "comm.bucket_bytes": _rule("either", "small buckets cost latency, large ones overlap less"),
    "comm.hook": _rule("either", "half the bytes on the wire, but casts"),
    "comm.prefetch_bwd": _rule(
        _ordered("pre", "post", "none"), "an earlier gather overlaps more compute"
    ),
    "comm.prefetch_fwd": _rule(_falls, "gathers are issued earlier on the CPU"),
    "comm.limit_all_gathers": _rule("either", "the CPU waits, but the allocator retries less"),
    "comm.grad_sync": _rule(
        _ordered("last_microbatch", "every_microbatch"), "one reduction per micro step"
    ),
    "offload.params": _rule(
        _ordered("none", "cpu"), "copies over PCIe each step, and the optimizer runs on the CPU"
    ),
    "offload.pin_memory": _rule(_falls, "pinned host memory copies faster, asynchronously"),
    "ddp.static_graph": _rule(_falls, "the graph is not searched each step"),
    "ddp.find_unused_parameters": _rule(rises, "the autograd graph is searched each step"),
    "precision.param_storage": _rule(_by_width, "fewer bytes to move and to compute on"),
    "precision.compute": _rule(_by_width, "tensor cores and half the bytes to gather"),
    "precision.reduce": _rule(_by_width, "bytes on the wire follow this dtype"),
    "precision.autocast": _rule(_by_width, "matmuls run on tensor cores, casts are added"),
    "precision.output": _rule("either", "casts of each unit's output"),
    "precision.cast_inputs": _rule("either", "casts of each unit's inputs"),
    "precision.buffer": _rule("either", "casts of buffers"),
    "precision.grad_scaler": _rule(rises, "gradients are unscaled and checked each step"),
    "fsdp1.keep_low_precision_grads": _rule("either", "casts of gradients are left out"),
    "recompute.mode": _rule(_RECOMPUTE, "recomputed blocks run their forward twice"),
    "recompute.granularity": _rule(_falls, "fewer blocks run their forward twice"),
    "compile.enabled": _rule(_falls, "fused kernels; the first step compiles"),
    "batch.micro": _SIZE,
    "batch.seq_len": _SIZE,
    "batch.accumulation": _rule(rises, "each micro step is a forward and a backward"),
    "optimizer.kind": _rule(_ordered("sgd", "adamw"), "AdamW reads and writes two moments"),
    "optimizer.momentum": _rule(_zero_flip, "one more buffer to read and write"),
    "optimizer.implementation": _rule(
        _ordered("fused", "foreach", "default", "for_loop"), "fewer kernels and passes"
    ),
    "optimizer.weight_decay": _rule(_zero_flip, "one more pass over the gradients"),
    "optimizer.grad_clip": _rule(_clip, "one norm over all gradients, reduced over the ranks"),
    "fsdp1.use_orig_params": _rule("either", "views of the flat parameter are rebuilt each step"),
    "model.layers": _SIZE,
    "model.hidden": _SIZE,
    "model.ffn": _SIZE,
    "model.vocab": _SIZE,
    "model.tied_embeddings": _rule(_falls, "one gradient less to reduce"),
    "model.heads": _rule("either", "another shape of attention"),
    "model.kv_heads": _SIZE,
    "model.factory": _rule("either", "another model"),
    "model.kwargs": _rule("either", "another model"),
    "model.loss": _rule("either", "another loss function"),
    "model.batch": _rule("either", "another input"),
}
