"""Memory effects of each field of a Megatron job."""

from __future__ import annotations

from fsdp_doctor.config.effects.base import EffectContext, EffectRule, effect, rises
from fsdp_doctor.config.effects.megatron import (
    CORE,
    DDP,
    FSDP,
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
    widens,
)
from fsdp_doctor.model.config import ConfigChange, Effect
from fsdp_doctor.model.memory import Category, Phase

_SHARDED = states(
    ordered("optim_grads_params", "optim_grads", "optim", "none"),
    "what is divided among data-parallel ranks is kept as 1/d",
)
_GATHERED = "parameters are gathered ahead in a window, gradients wait whole for their reduction"


def _bucket(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    """Megatron-FSDP cuts what lies outside of its units into buckets of this size."""
    impls = (context.value_before("sharding.impl"), context.value("sharding.impl"))
    if "megatron_fsdp" not in impls:
        return rule(buffers("none", "buckets are parts of one gradient buffer"))(change, context)
    why = "parameters outside of units are gathered and reduced in buckets of this size"
    in_flight = (Category.UNSHARDED_PARAMETERS, Category.UNSHARDED_GRADIENTS)
    return tuple(effect(category, "either", why, FSDP) for category in in_flight)


def _engine(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    """Where the strategy changes too, the states are told there."""
    own = (buffers("either", "other gather and reduce buffers", FSDP), scratch("either", "casts"))
    strategies = [side.fields.get("sharding.strategy") for side in (context.a, context.b)]
    same = len({None if s is None else s.value for s in strategies}) == 1
    said = (*states("either", "gradients may have another dtype"), *own) if same else own
    return rule(*said)(change, context)


def _nothing(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    """No memory on the device changes."""
    return ()


_SHARDING: dict[str, EffectRule] = {
    "sharding.impl": _engine,
    "sharding.strategy": rule(
        *_SHARDED[:3],
        Says(
            Category.UNSHARDED_PARAMETERS,
            ordered("optim", "optim_grads_params"),
            _GATHERED,
            FSDP,
        ),
        Says(Category.UNSHARDED_GRADIENTS, ordered("optim", "optim_grads_params"), _GATHERED, FSDP),
    ),
    "sharding.outer": rule(
        Says(
            Category.OPTIMIZER_STATE,
            ordered("optim", "none"),
            "optimizer state is divided among the outer groups too",
            FSDP,
            formed=False,
        )
    ),
    "sharding.instances": rule(*states(rises, "each instance has its own, larger shards")),
    "sharding.shard_size": rule(*states(falls, "shards are 1/d")),
    "sharding.replicate_size": _nothing,
    "sharding.reshard_after_forward": rule(
        Says(
            Category.UNSHARDED_PARAMETERS,
            falls,
            "units stay gathered between forward and backward",
            "megatron/core/distributed/torch_fully_sharded_data_parallel.py (0.13-0.19)",
        )
    ),
    "world.size": rule(*states(falls, "shards are 1/d")),
    "parallel.dp": rule(*states(falls, "shards are 1/d")),
}

_COMMUNICATION: dict[str, EffectRule] = {
    "comm.overlap_grad_reduce": rule(
        buffers("none", "buckets are parts of one gradient buffer, overlapped or not")
    ),
    "comm.overlap_param_gather": rule(
        buffers("none", "parameters are gathered into the buffer that they live in")
    ),
    "comm.bucket_bytes": _bucket,
    "comm.unit_elems": rule(
        Says(
            Category.UNSHARDED_PARAMETERS,
            rises,
            "units that fill half of it are gathered ahead of the one in use",
            FSDP,
        ),
        Says(Category.UNSHARDED_GRADIENTS, rises, "all of it may wait for reduction", FSDP),
    ),
    "comm.average_in_collective": _nothing,
    "comm.align_param_gather": _nothing,
    "comm.p2p_overlap": rule(buffers("either", "more stage outputs are in flight", CORE)),
    "comm.grad_sync": rule(buffers("either", "gradients are reduced more or less often")),
    "comm.user_buffers": rule(
        buffers(switched_on, "registered buffers are never given back to the allocator", FSDP)
    ),
    "comm.double_buffer": rule(
        Says(Category.UNSHARDED_PARAMETERS, "either", "two units at most are gathered", FSDP),
        Says(Category.UNSHARDED_GRADIENTS, "either", "two units at most wait", FSDP),
        buffers(switched_on, "two units of weights and of gradients persist", FSDP),
    ),
    "comm.manual_registration": rule(buffers("either", "buffers are registered together", FSDP)),
    "comm.pad_buckets": rule(buffers(switched_on, "buckets are padded to multiples of 2^16")),
    "comm.reduce_scatter_fp32_accumulation": rule(
        buffers(switched_on, "one bucket-sized output per reduction in flight")
    ),
    "comm.tp_overlap": rule(buffers(switched_on, "Transformer Engine's user buffers", CORE)),
}

_PRECISION: dict[str, EffectRule] = {
    "precision.compute": rule(
        *states(widens, "bytes per element"),
        activations(widens, "saved in the computed dtype"),
        logits(widens, "logits come in the computed dtype"),
        scratch(widens, "scratch of forward and backward"),
    ),
    "precision.param_storage": rule(
        Says(Category.PARAMETERS, widens, "bytes per stored weight"),
        Says(Category.UNSHARDED_PARAMETERS, widens, "gathered as stored", FSDP),
        scratch("either", "transposed copies of fp8 weights"),
    ),
    "precision.grad": rule(
        Says(Category.GRADIENTS, widens, "bytes per element of the gradient buffer", DDP),
        Says(
            Category.OPTIMIZER_STATE,
            "either",
            "gradients narrower than float32 are copied to float32 for the optimizer",
        ),
        Says(Category.UNSHARDED_GRADIENTS, widens, "whole gradients have this dtype", FSDP),
    ),
    "precision.reduce": rule(buffers(widens, "gradients are reduced in this dtype")),
    "precision.master": rule(Says(Category.OPTIMIZER_STATE, widens, "main copy of the weights")),
    "precision.optim_states": rule(Says(Category.OPTIMIZER_STATE, widens, "first moment")),
    "precision.optim_states_sq": rule(Says(Category.OPTIMIZER_STATE, widens, "second moment")),
    "precision.residual_fp32": rule(
        Says(
            Category.ACTIVATIONS, switched_on, "the residual stream is float32", CORE, formed=False
        )
    ),
    "precision.fp8": rule(
        Says(
            Category.ACTIVATIONS,
            switched_off,
            "inputs of linear layers are saved in 8 bits",
            CORE,
            formed=False,
        ),
        Says(
            Category.UNSHARDED_PARAMETERS,
            switched_on,
            "8-bit copies of the weights, and their transposes",
            CORE,
            formed=False,
        ),
    ),
    "precision.fp8_recipe": rule(scratch("either", "other scales, other transposes")),
    "precision.fp4": rule(scratch("either", "4-bit copies beside the weights")),
}

_RECOMPUTE = rule(
    activations("either", "what is recomputed is not saved"),
    Says(
        Category.TEMPORARIES,
        "either",
        "what is being recomputed lives in backward",
        CORE,
        phase=Phase.BACKWARD,
        formed=False,
    ),
)
_OFFLOADED = rule(activations("either", "saved activations are moved to the host"))
_RECOMPUTATION: dict[str, EffectRule] = {
    "recompute.mode": rule(
        activations(ordered("full", "selective", "none"), "what is recomputed is not saved"),
        Says(
            Category.TEMPORARIES,
            "either",
            "what is being recomputed lives in backward",
            CORE,
            phase=Phase.BACKWARD,
            formed=False,
        ),
    ),
    "recompute.modules": _RECOMPUTE,
    "recompute.method": _RECOMPUTE,
    "recompute.num_layers": _RECOMPUTE,
    "recompute.distribute_saved": rule(
        activations(switched_off, "saved inputs are divided among tensor-parallel ranks")
    ),
    "recompute.impl": rule(scratch("either", "another implementation of recomputation")),
    "offload.optimizer": rule(
        Says(
            Category.OPTIMIZER_STATE,
            ordered("cpu", "none"),
            "moments (precision-aware: main weights too) are in host memory",
        ),
        buffers("either", "gradients go to the host, weights come back", DDP),
    ),
    "offload.optimizer_fraction": rule(
        Says(Category.OPTIMIZER_STATE, falls, "the moments of this share are in host memory")
    ),
    "offload.optimizer_overlap": rule(
        buffers(switched_on, "copies in flight need buffers", "megatron hybrid_optimizer.py")
    ),
    "offload.activations": rule(
        Says(
            Category.ACTIVATIONS,
            switched_off,
            "saved activations are moved to the host",
            CORE,
            formed=False,
        )
    ),
    "offload.activation_layers": _OFFLOADED,
    "offload.modules": rule(
        Says(
            Category.ACTIVATIONS,
            switched_off,
            "inputs of these modules are moved to the host",
            CORE,
            formed=False,
        )
    ),
}

_OPTIMIZER: dict[str, EffectRule] = {
    "optimizer.kind": rule(
        Says(
            Category.OPTIMIZER_STATE,
            ordered("sgd", "muon", "dist_muon", "lion", "adamw"),
            "moments per weight",
        ),
        scratch("either", "scratch of the step", "megatron/core/optimizer"),
    ),
    "optimizer.precision_aware": rule(
        Says(
            Category.OPTIMIZER_STATE,
            switched_off,
            "no float32 copy of the gradients; moments have dtypes of their own",
        )
    ),
    "optimizer.layer_wise_layout": rule(
        Says(
            Category.GRADIENTS,
            switched_on,
            "each shard holds whole parameters and is padded to the largest shard",
            "megatron/core/optimizer/layer_wise_optimizer.py (0.18-0.19)",
            formed=False,
        )
    ),
    "optimizer.grad_clip": _nothing,
    "megatron.gradient_accumulation_fusion": rule(
        Says(
            Category.TEMPORARIES,
            switched_off,
            "weight gradients are added to the buffer without a copy of their own",
            "megatron/core/tensor_parallel/layers.py (0.12-0.19)",
            phase=Phase.BACKWARD,
            formed=False,
        )
    ),
    "megatron.manual_gc": _nothing,
    "memory.empty_cache_level": _nothing,
    "checks.nan_in_grad": _nothing,
    "ckpt.format": _nothing,
    "ckpt.async": _nothing,
    "ckpt.fully_parallel_save": _nothing,
    "init.meta_device": rule(
        Says(
            Category.PARAMETERS,
            switched_off,
            "weights are made on no device and filled unit by unit",
            FSDP,
            phase=Phase.INIT,
            formed=False,
        )
    ),
    "init.cpu": rule(
        Says(
            Category.PARAMETERS,
            switched_off,
            "weights are made on the host",
            CORE,
            phase=Phase.INIT,
            formed=False,
        )
    ),
    "compile.cuda_graphs": rule(
        Says(
            Category.ACTIVATIONS,
            switched_on,
            "graphs keep their inputs, outputs and private pools",
            CORE,
            formed=False,
        )
    ),
}

RULES: dict[str, EffectRule] = {
    **_SHARDING,
    **_COMMUNICATION,
    **_PRECISION,
    **_RECOMPUTATION,
    **_OPTIMIZER,
}
"""Fields of the engine; those of sizes and shape are in ``megatron_shape_rules``."""
