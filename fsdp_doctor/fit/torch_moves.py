"""Changes of DDP, FSDP1 and FSDP2."""

from __future__ import annotations

from fsdp_doctor.fit.move import ACCUMULATION, STRATEGY, Move, above, is_one_of, not_

_SYNC = "config.gradient_accumulation.sync"
_MODE = "config.activation_checkpointing.mode"
_EVERY = "config.activation_checkpointing.every_n"
_IMPLEMENTATION = "config.optimizer.implementation"
_TORCH = is_one_of("ddp", "fsdp1", "fsdp2")
_FSDP1, _FSDP2, _DDP = is_one_of("fsdp1"), is_one_of("fsdp2"), is_one_of("ddp")
_NONE = is_one_of(None)
_FLOAT32 = is_one_of(None, "float32")
_IN_FLOAT32 = {"config.precision.autocast": _NONE, "config.precision.parameters": _FLOAT32}
_RECOMPUTE = "blocks run their forward again in backward"
_SELECTIVE = "parts of blocks run again in backward; the host asks a policy at every operator"
_GATHER = "all-gathers of the parameters in backward"


def _checkpointing(mode: str, strength: int, before: tuple[str, ...], title: str) -> Move:
    return Move(
        name=f"checkpoint-{mode.replace('_', '-')}",
        title=title,
        family="checkpointing",
        strength=strength,
        when={STRATEGY: _TORCH, _MODE: is_one_of(*before), "config.compile": is_one_of(False)},
        sets={_MODE: mode, **({_EVERY: 2} if mode == "every_n" else {})},
        saves="activations of blocks",
        costs=_SELECTIVE if mode == "selective" else _RECOMPUTE,
    )


def _fsdp1_sharding(target: str, strength: int, before: tuple[str, ...]) -> Move:
    hybrid = "HYBRID" in before[0]
    return Move(
        name=f"fsdp1-{target.lower().replace('_', '-')}" + ("-from-hybrid" if hybrid else ""),
        title=f"FSDP1 {target}",
        family="fsdp1-sharding",
        strength=strength,
        when={
            STRATEGY: _FSDP1,
            "config.fsdp1.sharding_strategy": is_one_of(*before),
        },
        sets={
            "config.fsdp1.sharding_strategy": target,
            **({"config.fsdp1.mesh": None} if hybrid and "HYBRID" not in target else {}),
        },
        saves="gathered parameters, or gradients and optimizer state",
        costs=_GATHER,
    )


MOVES: tuple[Move, ...] = (
    Move(
        name="ddp-to-fsdp2",
        title="FSDP2 in place of DDP",
        family="engine",
        when={
            STRATEGY: _DDP,
            "config.ddp.comm_hook": is_one_of("none"),
            "config.ddp.find_unused_parameters": is_one_of(False),
            "config.precision.grad_scaler": is_one_of(False),
            "world_size": above(1),
        },
        sets={STRATEGY: "fsdp2", "config.fsdp2.reshard_after_forward": True},
        saves="parameters, gradients and optimizer state: each rank keeps its shard",
        costs="all-gathers of the parameters in forward and backward",
    ),
    Move(
        name="fused-optimizer",
        title="fused optimizer",
        family="optimizer-implementation",
        when={STRATEGY: _TORCH, _IMPLEMENTATION: is_one_of("default", "foreach")},
        sets={_IMPLEMENTATION: "fused"},
        saves="temporaries of the foreach optimizer",
        costs="nothing: fewer kernels",
    ),
    Move(
        name="for-loop-optimizer",
        title="optimizer one parameter at a time",
        family="optimizer-implementation",
        strength=2,
        when={STRATEGY: _TORCH, _IMPLEMENTATION: is_one_of("default", "foreach")},
        sets={_IMPLEMENTATION: "for_loop"},
        saves="temporaries of the foreach optimizer",
        costs="many small kernels in the optimizer's step",
    ),
    Move(
        name="bucket-views",
        title="gradients as views of DDP's buckets",
        family="bucket-views",
        when={
            STRATEGY: _DDP,
            "config.ddp.gradient_as_bucket_view": is_one_of(False),
        },
        sets={"config.ddp.gradient_as_bucket_view": True},
        saves="one copy of the gradients",
        costs="nothing: fewer copies",
    ),
    Move(
        name="fsdp2-reshard",
        title="reshard after forward",
        family="fsdp2-reshard",
        when={
            STRATEGY: _FSDP2,
            "config.fsdp2.reshard_after_forward": not_(is_one_of(True)),
            "world_size": above(1),
        },
        sets={"config.fsdp2.reshard_after_forward": True},
        saves="gathered parameters between forward and backward",
        costs=_GATHER,
    ),
    Move(
        name="fsdp2-full-shard",
        title="shard over all ranks in place of a hybrid mesh",
        family="fsdp2-mesh",
        when={STRATEGY: _FSDP2, "config.fsdp2.mesh.replicate": above(1)},
        sets={"config.fsdp2.mesh": None},
        saves="parameters, gradients and optimizer state: smaller shards",
        costs="collectives over more ranks, perhaps over slower links",
    ),
    _fsdp1_sharding("SHARD_GRAD_OP", 1, ("NO_SHARD",)),
    _fsdp1_sharding("FULL_SHARD", 2, ("NO_SHARD", "SHARD_GRAD_OP")),
    _fsdp1_sharding("HYBRID_SHARD", 1, ("_HYBRID_SHARD_ZERO2",)),
    _fsdp1_sharding("FULL_SHARD", 2, ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")),
    Move(
        name="fsdp1-wrap-blocks",
        title="one FSDP1 unit for each block",
        family="wrap",
        when={STRATEGY: _FSDP1, "config.fsdp1.wrap": is_one_of("none")},
        sets={"config.fsdp1.wrap": "block"},
        saves="gathered parameters and gradients of all but a few blocks",
        costs="more and smaller collectives",
    ),
    Move(
        name="fsdp2-wrap-blocks",
        title="one FSDP2 unit for each block",
        family="wrap",
        when={STRATEGY: _FSDP2, "config.fsdp2.wrap": is_one_of("none")},
        sets={"config.fsdp2.wrap": "block"},
        saves="gathered parameters and gradients of all but a few blocks",
        costs="more and smaller collectives",
    ),
    Move(
        name="fsdp2-one-block-per-unit",
        title="one block in each FSDP2 unit",
        family="wrap",
        when={
            STRATEGY: _FSDP2,
            "config.fsdp2.wrap": is_one_of("block"),
            "config.fsdp2.blocks_per_unit": above(1),
        },
        sets={"config.fsdp2.blocks_per_unit": 1},
        saves="gathered parameters and gradients of the larger units",
        costs="more and smaller collectives",
    ),
    Move(
        name="fsdp1-limit-all-gathers",
        title="limit all-gathers",
        family="fsdp1-limit",
        when={STRATEGY: _FSDP1, "config.fsdp1.limit_all_gathers": is_one_of(False)},
        sets={"config.fsdp1.limit_all_gathers": True},
        saves="gathered parameters that the host runs ahead with",
        costs="the host waits for the GPU",
    ),
    Move(
        name="fsdp1-no-forward-prefetch",
        title="no forward prefetch",
        family="fsdp1-forward-prefetch",
        when={STRATEGY: _FSDP1, "config.fsdp1.forward_prefetch": is_one_of(True)},
        sets={"config.fsdp1.forward_prefetch": False},
        saves="the next unit's gathered parameters",
        costs="all-gathers start later",
    ),
    Move(
        name="fsdp1-backward-prefetch-post",
        title="backward prefetch after the unit's own gradients",
        family="fsdp1-backward-prefetch",
        when={
            STRATEGY: _FSDP1,
            "config.fsdp1.backward_prefetch": is_one_of("BACKWARD_PRE"),
        },
        sets={"config.fsdp1.backward_prefetch": "BACKWARD_POST"},
        saves="the next unit's gathered parameters",
        costs="all-gathers of backward overlap less",
    ),
    Move(
        name="sync-every-microbatch",
        title="reduce gradients in every micro step",
        family="gradient-sync",
        when={
            STRATEGY: is_one_of("fsdp1", "fsdp2"),
            ACCUMULATION: above(1),
            _SYNC: is_one_of("last_microbatch"),
        },
        sets={_SYNC: "every_microbatch"},
        saves="unsharded gradients of the whole model",
        costs="one reduction of the gradients for each micro step",
    ),
    _checkpointing("selective", 1, ("none",), "selective activation checkpointing"),
    _checkpointing("every_n", 2, ("none",), "checkpoint every second block"),
    _checkpointing("full", 3, ("none", "selective", "every_n"), "checkpoint every block"),
    Move(
        name="fsdp2-reduce-bf16",
        title="reduce gradients in bfloat16",
        family="reduce-dtype",
        when={
            STRATEGY: _FSDP2,
            "config.fsdp2.mp_policy.param_dtype": is_one_of("bfloat16"),
            "config.fsdp2.mp_policy.reduce_dtype": is_one_of("float32"),
        },
        sets={"config.fsdp2.mp_policy.reduce_dtype": "bfloat16"},
        saves="half of the gradients' communication buffers",
        costs="nothing: fewer bytes on the wire",
        numerics="rounding",
    ),
    Move(
        name="fsdp1-reduce-bf16",
        title="reduce gradients in bfloat16",
        family="reduce-dtype",
        when={
            STRATEGY: _FSDP1,
            "config.fsdp1.mixed_precision.param_dtype": is_one_of("bfloat16"),
            "config.fsdp1.mixed_precision.reduce_dtype": is_one_of("float32"),
        },
        sets={"config.fsdp1.mixed_precision.reduce_dtype": "bfloat16"},
        saves="half of the gradients' communication buffers",
        costs="nothing: fewer bytes on the wire",
        numerics="rounding",
    ),
    Move(
        name="fsdp2-compute-bf16",
        title="compute in bfloat16, reduce in float32",
        family="compute-dtype",
        when={
            STRATEGY: _FSDP2,
            "config.fsdp2.mp_policy.param_dtype": _FLOAT32,
            **_IN_FLOAT32,
        },
        sets={
            "config.fsdp2.mp_policy.param_dtype": "bfloat16",
            "config.fsdp2.mp_policy.reduce_dtype": "float32",
        },
        saves="half of activations and gathered parameters",
        costs="nothing: matrix units are faster in bfloat16",
        numerics="rounding",
    ),
    Move(
        name="fsdp1-compute-bf16",
        title="compute in bfloat16, reduce in float32",
        family="compute-dtype",
        when={
            STRATEGY: _FSDP1,
            "config.fsdp1.mixed_precision.param_dtype": _FLOAT32,
            **_IN_FLOAT32,
        },
        sets={
            "config.fsdp1.mixed_precision.param_dtype": "bfloat16",
            "config.fsdp1.mixed_precision.reduce_dtype": "float32",
        },
        saves="half of activations and gathered parameters",
        costs="nothing: matrix units are faster in bfloat16",
        numerics="rounding",
    ),
    Move(
        name="ddp-autocast-bf16",
        title="autocast to bfloat16",
        family="compute-dtype",
        when={STRATEGY: _DDP, **_IN_FLOAT32},
        sets={"config.precision.autocast": "bfloat16"},
        saves="half of many activations",
        costs="casts; matrix units are faster in bfloat16",
        numerics="rounding",
    ),
    Move(
        name="fsdp2-offload",
        title="parameters, gradients and optimizer on the host",
        family="offload",
        when={STRATEGY: _FSDP2, "config.fsdp2.offload_policy": _NONE},
        sets={"config.fsdp2.offload_policy.pin_memory": True},
        saves="shards of parameters, gradients and optimizer state",
        costs="copies over PCIe each step, and the optimizer runs on the CPU",
    ),
    Move(
        name="fsdp1-offload",
        title="parameters, gradients and optimizer on the host",
        family="offload",
        when={
            STRATEGY: _FSDP1,
            "config.fsdp1.cpu_offload": _NONE,
            "config.fsdp1.cpu_offload.offload_params": is_one_of(None, False),
        },
        sets={"config.fsdp1.cpu_offload.offload_params": True},
        saves="shards of parameters, gradients and optimizer state",
        costs="copies over PCIe each step, and the optimizer runs on the CPU",
    ),
    Move(
        name="pure-bf16",
        title="weights and optimizer state in bfloat16",
        family="storage-dtype",
        when={
            STRATEGY: _TORCH,
            "config.precision.parameters": is_one_of("float32"),
            "config.precision.grad_scaler": is_one_of(False),
        },
        sets={"config.precision.parameters": "bfloat16"},
        saves="half of parameters, gradients and optimizer state",
        costs="small updates are lost to rounding: convergence must be looked at",
        numerics="precision",
    ),
)
