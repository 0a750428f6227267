"""Changes of Megatron-Core jobs: its DDP, distributed optimizer, Megatron-FSDP, torch's FSDP2."""

from __future__ import annotations

from fsdp_doctor.fit.move import STRATEGY, Condition, Move, is_one_of

_DIST, _DDP = "config.megatron.dist.", "config.megatron.ddp."
_MODEL, _OPTIMIZER = "config.megatron.model.", "config.megatron.optimizer."
_MEGATRON = {STRATEGY: is_one_of("megatron")}
_OFF, _ON = is_one_of(False), is_one_of(True)
_NO_FSDP = {
    f"{_DIST}use_megatron_fsdp": _OFF,
    f"{_DDP}use_megatron_fsdp": _OFF,
    f"{_DIST}use_torch_fsdp2": _OFF,
}
_DISTRIBUTED = {**_NO_FSDP, f"{_DDP}use_distributed_optimizer": _ON}
_SHARDING = f"{_DDP}data_parallel_sharding_strategy"
_GRANULARITY = f"{_MODEL}recompute_granularity"


def _fsdp(target: str, strength: int, before: Condition, saves: str) -> Move:
    return Move(
        name=f"mfsdp-{target.replace('_', '-')}",
        title=f"Megatron-FSDP {target}",
        family="mfsdp-sharding",
        strength=strength,
        when={**_MEGATRON, f"{_DIST}use_megatron_fsdp": _ON, _SHARDING: before},
        sets={_SHARDING: target},
        saves=saves,
        costs="more collectives over shards",
    )


MOVES: tuple[Move, ...] = (
    Move(
        name="mcore-distributed-optimizer",
        title="distributed optimizer",
        family="mcore-optimizer",
        when={**_MEGATRON, **_NO_FSDP, f"{_DDP}use_distributed_optimizer": _OFF},
        sets={f"{_DDP}use_distributed_optimizer": True},
        saves="optimizer state and float32 weights: each rank keeps its shard",
        costs="an all-gather of the parameters each step",
    ),
    _fsdp("optim", 1, is_one_of("no_shard"), "optimizer state and float32 weights"),
    _fsdp(
        "optim_grads",
        2,
        is_one_of("no_shard", "optim"),
        "gradients, optimizer state and float32 weights",
    ),
    _fsdp(
        "optim_grads_params",
        3,
        is_one_of("no_shard", "optim", "optim_grads"),
        "parameters, gradients and optimizer state",
    ),
    Move(
        name="mfsdp-small-unit",
        title="at most 100 M elements in flight",
        family="mfsdp-unit",
        when={
            **_MEGATRON,
            f"{_DIST}use_megatron_fsdp": _ON,
            _SHARDING: is_one_of("optim_grads", "optim_grads_params"),
            f"{_DDP}suggested_communication_unit_size": is_one_of(None),
        },
        sets={f"{_DDP}suggested_communication_unit_size": 100_000_000},
        saves="parameters gathered ahead, gradients that wait to be reduced",
        costs="smaller collectives, less of them ahead",
    ),
    Move(
        name="mfsdp-single-buffer",
        title="Megatron-FSDP without double buffers",
        family="mfsdp-buffer",
        when={
            **_MEGATRON,
            f"{_DIST}use_megatron_fsdp": _ON,
            f"{_DDP}fsdp_double_buffer": _ON,
        },
        sets={f"{_DDP}fsdp_double_buffer": False},
        saves="the second set of communication buffers",
        costs="buffers are allocated anew; no user-buffer registration",
    ),
    Move(
        name="mcore-fsdp2-reshard",
        title="reshard after forward",
        family="mcore-fsdp2-reshard",
        when={
            **_MEGATRON,
            f"{_DIST}use_torch_fsdp2": _ON,
            f"{_DIST}torch_fsdp2_reshard_after_forward": _OFF,
        },
        sets={f"{_DIST}torch_fsdp2_reshard_after_forward": True},
        saves="gathered parameters between forward and backward",
        costs="all-gathers of the parameters in backward",
    ),
    Move(
        name="mcore-recompute-selective",
        title="recompute core attention",
        family="mcore-recompute",
        when={**_MEGATRON, _GRANULARITY: is_one_of(None)},
        sets={_GRANULARITY: "selective"},
        saves="activations of core attention",
        costs="core attention runs again in backward",
    ),
    Move(
        name="mcore-recompute-full",
        title="recompute every layer",
        family="mcore-recompute",
        strength=2,
        when={**_MEGATRON, _GRANULARITY: is_one_of(None, "selective")},
        sets={
            _GRANULARITY: "full",
            f"{_MODEL}recompute_method": "uniform",
            f"{_MODEL}recompute_num_layers": 1,
            f"{_MODEL}recompute_modules": None,
        },
        saves="activations of layers",
        costs="layers run their forward again in backward",
    ),
    Move(
        name="mcore-bf16-gradients",
        title="gradients in bfloat16",
        family="mcore-gradients",
        when={
            **_MEGATRON,
            f"{_DDP}grad_reduce_in_fp32": _ON,
            f"{_MODEL}bf16": _ON,
        },
        sets={f"{_DDP}grad_reduce_in_fp32": False},
        saves="half of the gradient buffer",
        costs="nothing: fewer bytes on the wire",
        numerics="rounding",
    ),
    Move(
        name="mcore-offload-optimizer",
        title="optimizer on the host",
        family="mcore-offload",
        when={**_MEGATRON, **_DISTRIBUTED, f"{_OPTIMIZER}optimizer_cpu_offload": _OFF},
        sets={
            f"{_OPTIMIZER}optimizer_cpu_offload": True,
            f"{_OPTIMIZER}optimizer_offload_fraction": 1.0,
        },
        saves="optimizer state and float32 weights",
        costs="gradients and parameters cross PCIe each step, and the optimizer runs on the CPU",
    ),
)
