"""Memory effects of batch, parallel sizes, model shape, attention and loss of a Megatron job."""

from __future__ import annotations

from fsdp_doctor.config.effects.base import EffectContext, EffectRule, rises
from fsdp_doctor.config.effects.megatron import (
    CORE,
    Says,
    activations,
    buffers,
    falls,
    logits,
    ordered,
    rule,
    scratch,
    states,
    switched_off,
    switched_on,
)
from fsdp_doctor.model.config import ConfigChange, Effect
from fsdp_doctor.model.memory import Category

_TOKENS = "proportional to the tokens of a micro batch"
_SCRATCH = "scratch of a layer follows its size"
_ENV = "transformer_engine: workspaces of attention and matrix multiplication"


def _inputs(reason: str) -> Says:
    return Says(Category.INPUTS, rises, reason, CORE, formed=False)


_ONE_MATRIX = rule(*states(switched_off, "embedding and output layer are one matrix"))


def _tied(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    """With several stages the last one has an output layer of its own, tied or not."""
    stages = (context.value_before("parallel.pp"), context.value("parallel.pp"))
    if all(isinstance(size, int) and size > 1 for size in stages):
        return ()
    return _ONE_MATRIX(change, context)


_LEARNED = rule(*states(rises, "learned positions are parameters"))


def _positions(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    """Rotary positions have no parameters."""
    learned = context.either_side("model.position_embedding", "learned_absolute")
    return _LEARNED(change, context) if learned else ()


_BATCH_TOKENS = rule(
    activations(rises, _TOKENS),
    logits(rises, _TOKENS),
    scratch(rises, _TOKENS),
    _inputs(_TOKENS),
)
_SIZE = rule(
    *states(rises, "follows the number of parameters"),
    activations(rises, "saved per layer and channel"),
    logits("either", "one logit per token and word"),
)
_SIZE_SCRATCH = rule(
    *states(rises, "follows the number of parameters"),
    activations(rises, "saved per layer and channel"),
    logits("either", "one logit per token and word"),
    scratch(rises, _SCRATCH),
)
_EXPERT_SIZE = rule(
    *states(rises, "follows the number of parameters"),
    activations(rises, "saved per token and chosen expert"),
)

RULES: dict[str, EffectRule] = {
    "batch.micro": _BATCH_TOKENS,
    "batch.seq_len": _BATCH_TOKENS,
    "batch.global": rule(
        activations(rises, "fewer micro batches than stages leave the pipeline part empty")
    ),
    "batch.accumulation": rule(
        activations(rises, "fewer micro batches than stages leave the pipeline part empty")
    ),
    "batch.rampup": rule(activations("either", "the number of micro batches changes as it runs")),
    "parallel.tp": rule(
        *states(falls, "matrices are divided among tensor-parallel ranks"),
        activations(falls, "heads and feed-forward are divided among tensor-parallel ranks"),
        logits(falls, "the vocabulary is divided among tensor-parallel ranks"),
        buffers("either", "activations are reduced and gathered", CORE),
    ),
    "parallel.sp": rule(
        activations(switched_off, "norms and dropout work on 1/t of the sequence"),
        buffers("either", "the sequence is gathered for each linear layer", CORE),
    ),
    "parallel.pp": rule(
        *states(falls, "layers are divided among stages"),
        activations(
            "either", "a stage has fewer layers, but as many micro batches in flight as stages"
        ),
        buffers("either", "outputs of stages are sent on", CORE),
    ),
    "parallel.vpp": rule(
        activations(rises, "interleaved stages have more micro batches in flight")
    ),
    "parallel.cp": rule(
        activations(falls, "each rank has 1/c of the sequence"),
        logits(falls, "each rank has 1/c of the sequence"),
        *states("either", "the shard group includes context-parallel ranks"),
        buffers("either", "keys and values are passed around", CORE),
    ),
    "parallel.ep": rule(
        *states(falls, "experts are divided among ranks"),
        buffers("either", "tokens are sent to their experts", CORE),
    ),
    "parallel.etp": rule(
        *states(falls, "experts are divided among ranks"),
        activations("either", "tokens of an expert are shared"),
    ),
    "model.layers": _SIZE,
    "model.hidden": _SIZE_SCRATCH,
    "model.ffn": _SIZE_SCRATCH,
    "model.heads": rule(
        *states("either", "widths of the projections"),
        activations("either", "unfused attention keeps scores per head"),
        scratch("either", _SCRATCH),
    ),
    "model.kv_heads": _SIZE,
    "model.kv_channels": _SIZE,
    "model.vocab": rule(
        *states(rises, "follows the number of parameters"),
        logits(rises, "one logit per token and word"),
        scratch(rises, "the loss works on all words"),
    ),
    "model.tied_embeddings": _tied,
    "model.gated": _SIZE_SCRATCH,
    "model.max_positions": _positions,
    "model.position_embedding": rule(
        *states("either", "learned positions are parameters, rotary ones are not"),
        scratch("either", "rotary tables and products"),
    ),
    "model.implementation": rule(
        activations("either", "local attention keeps all scores"),
        scratch("either", "other kernels"),
    ),
    "attention.backend": rule(
        activations(
            ordered("flash", "fused", "auto", "unfused"),
            "unfused attention keeps the scores: 5 a s^2 b / t bytes a layer",
        ),
        scratch("either", "other kernels, other workspaces"),
    ),
    "loss.cross_entropy_fusion": rule(
        logits(
            ordered("te", "none", "native"),
            "the native fused loss makes one more float32 buffer of all logits",
        )
    ),
    "moe.experts": _EXPERT_SIZE,
    "moe.ffn": _EXPERT_SIZE,
    "moe.shared_ffn": _EXPERT_SIZE,
    "moe.topk": _EXPERT_SIZE,
    "moe.layer_frequency": rule(
        *states("either", "more or fewer layers have experts"),
        activations("either", "more or fewer layers have experts"),
    ),
    "moe.dispatcher": rule(
        Says(
            Category.ACTIVATIONS,
            ordered("flex", "alltoall", "allgather"),
            "allgather keeps the tokens of all ranks",
            CORE,
            formed=False,
        ),
        buffers("either", "tokens are exchanged otherwise", CORE),
    ),
    "moe.grouped_gemm": rule(scratch("either", "experts are computed together")),
    "moe.permute_fusion": rule(scratch("either", "permuted copies of tokens", CORE)),
    "moe.capacity_factor": rule(
        Says(
            Category.ACTIVATIONS,
            "either",
            "an expert takes a bounded number of tokens",
            CORE,
            formed=False,
        )
    ),
    "moe.pad_to_capacity": rule(
        Says(
            Category.ACTIVATIONS,
            switched_on,
            "experts are padded to their capacity",
            CORE,
            formed=False,
        )
    ),
    "megatron.deterministic": rule(scratch("either", "other kernels", _ENV)),
    "env.NVTE_ALLOW_NONDETERMINISTIC_ALGO": rule(scratch("either", "other kernels", _ENV)),
    "env.cuda_device_max_connections": rule(
        Says(
            Category.COMMUNICATION,
            "none",
            "order of kernels only",
            "CUDA programming guide",
            formed=False,
        )
    ),
    "comm.cp_type": rule(buffers("either", "keys and values are exchanged otherwise", CORE)),
    "comm.cp_hierarchy": rule(buffers("either", "keys and values are exchanged otherwise", CORE)),
}
