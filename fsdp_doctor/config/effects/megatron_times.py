"""In which direction a change moves the step time of a Megatron job, and why. Signs only."""

from __future__ import annotations

from fsdp_doctor.config.effects.base import EffectContext, TimeRule, rises
from fsdp_doctor.config.effects.megatron import (
    Way,
    falls,
    ordered,
    switched_off,
    switched_on,
    widens,
)
from fsdp_doctor.model.config import ConfigChange, Direction, StepTimeEffect


def _rule(way: Way, reason: str) -> TimeRule:
    def apply(change: ConfigChange, context: EffectContext) -> StepTimeEffect:  # noqa: ARG001
        direction = way(change) if callable(way) else way
        return StepTimeEffect(direction=direction, reason=reason)

    return apply


def _more_divided(change: ConfigChange) -> Direction:
    """One all-reduce moves as much as the reduce-scatter and all-gather of ``optim``."""
    rank = {"none": 0, "optim": 0, "optim_grads": 1, "optim_grads_params": 2}
    a, b = rank.get(str(change.a.value)), rank.get(str(change.b.value))
    if a is None or b is None or a == b:
        return "either"
    return "up" if b > a else "down"


_SIZE = _rule(rises, "more to compute and to communicate")
_PARALLEL = _rule("either", "less to compute on each rank, more to communicate")
_OFFLOAD = _rule(switched_on, "activations are copied over PCIe")

TIMES: dict[str, TimeRule] = {
    "sharding.impl": _rule("either", "other collectives, other overlap"),
    "sharding.strategy": _rule(
        _more_divided,
        "divided gradients are reduced in each micro batch, divided parameters gathered twice",
    ),
    "sharding.outer": _rule("either", "one more gather and reduction a step, over fewer ranks"),
    "sharding.instances": _rule("either", "less traffic between nodes, one more all-reduce"),
    "sharding.shard_size": _rule("either", "collectives over another group"),
    "sharding.replicate_size": _rule("either", "collectives over another group"),
    "sharding.reshard_after_forward": _rule(rises, "parameters are gathered again in backward"),
    "world.size": _rule("either", "collectives over another number of ranks"),
    "parallel.dp": _rule("either", "collectives over another number of ranks"),
    "parallel.tp": _PARALLEL,
    "parallel.sp": _rule("none", "an all-reduce becomes a gather and a reduce-scatter"),
    "parallel.pp": _rule("either", "stages wait for each other, but each has fewer layers"),
    "parallel.vpp": _rule(falls, "a smaller bubble, more messages"),
    "parallel.cp": _PARALLEL,
    "parallel.ep": _PARALLEL,
    "parallel.etp": _PARALLEL,
    "comm.overlap_grad_reduce": _rule(
        switched_off, "reductions hide behind backward; on a tiny model the buckets cost more"
    ),
    "comm.overlap_param_gather": _rule(
        switched_off, "gathers hide behind forward; on a tiny model they cost more"
    ),
    "comm.bucket_bytes": _rule("either", "small buckets cost latency, large ones overlap less"),
    "comm.unit_elems": _rule(falls, "a smaller window prefetches less"),
    "comm.average_in_collective": _rule(switched_off, "no pass of its own over the gradients"),
    "comm.align_param_gather": _rule("either", "stages gather together"),
    "comm.p2p_overlap": _rule(switched_off, "messages between stages hide behind compute"),
    "comm.grad_sync": _rule(
        ordered("last_microbatch", "every_microbatch"), "one reduction per micro batch"
    ),
    "comm.user_buffers": _rule(switched_off, "collectives take fewer multiprocessors"),
    "comm.double_buffer": _rule(switched_off, "buffers are not allocated anew for each unit"),
    "comm.manual_registration": _rule("either", "registration at once, at the start"),
    "comm.pad_buckets": _rule(switched_off, "better use of the links among many ranks"),
    "comm.reduce_scatter_fp32_accumulation": _rule("either", "all-to-all instead of a ring"),
    "comm.tp_overlap": _rule(switched_off, "tensor-parallel traffic hides behind compute"),
    "precision.compute": _rule(widens, "tensor cores, and half the bytes to move"),
    "precision.param_storage": _rule(widens, "bytes to gather"),
    "precision.grad": _rule(widens, "bytes to reduce"),
    "precision.reduce": _rule(widens, "bytes on the wire"),
    "precision.master": _rule(widens, "bytes that the optimizer reads and writes"),
    "precision.optim_states": _rule(widens, "bytes that the optimizer reads and writes"),
    "precision.optim_states_sq": _rule(widens, "bytes that the optimizer reads and writes"),
    "precision.residual_fp32": _rule(switched_on, "wider elements to read and write"),
    "precision.fp8": _rule(switched_off, "matrix multiplications in 8 bits, casts added"),
    "precision.fp8_recipe": _rule("either", "other scales"),
    "precision.fp4": _rule(switched_off, "matrix multiplications in 4 bits, casts added"),
    "recompute.mode": _rule(
        ordered("none", "selective", "full"), "full: about one more forward (30 %)"
    ),
    "recompute.modules": _rule("either", "other modules run twice"),
    "recompute.method": _rule("either", "other layers run twice"),
    "recompute.num_layers": _rule("either", "more or fewer layers run twice"),
    "recompute.distribute_saved": _rule(switched_on, "saved inputs are gathered in backward"),
    "recompute.impl": _rule("either", "another implementation"),
    "offload.optimizer": _rule(
        ordered("none", "cpu"), "gradients go to the host and the optimizer steps there"
    ),
    "offload.optimizer_fraction": _rule(rises, "a larger share steps on the host"),
    "offload.optimizer_overlap": _rule(switched_off, "copies hide behind the steps"),
    "offload.activations": _OFFLOAD,
    "offload.activation_layers": _rule(rises, "activations are copied over PCIe"),
    "offload.modules": _OFFLOAD,
    "batch.micro": _SIZE,
    "batch.seq_len": _SIZE,
    "batch.global": _rule(rises, "more micro batches a step"),
    "batch.accumulation": _rule(rises, "more micro batches a step"),
    "batch.rampup": _rule("either", "the number of micro batches changes as it runs"),
    "optimizer.kind": _rule("either", "other updates"),
    "optimizer.precision_aware": _rule("either", "moments of another width"),
    "optimizer.layer_wise_layout": _rule("either", "other collectives of the parameters"),
    "optimizer.grad_clip": _rule("either", "one norm over all gradients"),
    "megatron.gradient_accumulation_fusion": _rule(switched_off, "one pass less per weight"),
    "megatron.manual_gc": _rule(switched_off, "ranks collect garbage together"),
    "memory.empty_cache_level": _rule(rises, "the allocator asks the driver again"),
    "checks.nan_in_grad": _rule(switched_on, "one synchronisation a step"),
    "ckpt.format": _rule("either", "steps that save; others are not touched"),
    "ckpt.async": _rule(switched_off, "steps that save wait less"),
    "ckpt.fully_parallel_save": _rule(switched_off, "steps that save wait less"),
    "init.meta_device": _rule("none", "set-up only"),
    "init.cpu": _rule("none", "set-up only"),
    "compile.cuda_graphs": _rule(switched_off, "kernels are launched together"),
    "attention.backend": _rule(
        ordered("flash", "fused", "auto", "unfused"), "unfused attention writes all scores"
    ),
    "loss.cross_entropy_fusion": _rule(switched_off, "fewer passes over the logits"),
    "model.implementation": _rule("either", "other kernels"),
    "comm.cp_type": _rule("either", "keys and values are exchanged otherwise"),
    "comm.cp_hierarchy": _rule("either", "keys and values are exchanged otherwise"),
    "megatron.deterministic": _rule(switched_on, "kernels with a fixed order of sums"),
    "env.NVTE_ALLOW_NONDETERMINISTIC_ALGO": _rule("either", "kernels with a fixed order of sums"),
    "env.cuda_device_max_connections": _rule(
        "either", "1 orders kernels for tensor parallelism; FSDP wants more, to overlap"
    ),
    **{
        f"model.{name}": _SIZE for name in ("layers", "hidden", "ffn", "vocab", "kv_heads", "gated")
    },
    **{f"moe.{name}": _SIZE for name in ("experts", "ffn", "shared_ffn", "topk")},
    "moe.dispatcher": _rule("either", "tokens are exchanged otherwise"),
    "moe.grouped_gemm": _rule(switched_off, "experts are computed together"),
    "moe.permute_fusion": _rule(switched_off, "fewer kernels"),
    "moe.pad_to_capacity": _rule(switched_on, "padding is computed too"),
}
