"""The changes that ``fit`` may propose, as data.

A move sets fields of a spec where its conditions hold. It never changes what is trained: model,
data, global batch, optimizer and schedule stay. Moves of one family exclude each other; of these
the stronger saves more and costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_doctor.model.fit import Numerics

Fields = Mapping[str, Any]
"""Dotted keys of a spec -> values (``config.schema.leaf_values``)."""
Condition = Callable[[Any], bool]
Value = Any | Callable[[Fields], Any]

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One change."""

    name: str
    title: str
    family: str
    strength: int = 1
    when: Mapping[str, Condition]
    """Key -> what its value must be; a key that the spec lacks has the value None."""
    sets: Mapping[str, Value] = field(default_factory=dict)
    """Key -> value, or a function of the spec's fields."""
    environment: Mapping[str, str] = field(default_factory=dict)
    saves: str
    costs: str
    numerics: Numerics = "same"

    def applies(self, fields: Fields) -> bool:
        """Whether the move's conditions hold."""
        return all(holds(fields.get(key)) for key, holds in self.when.items())

    def values(self, fields: Fields) -> dict[str, Any]:
        """The fields it sets, with their values."""
        return {key: v(fields) if callable(v) else v for key, v in self.sets.items()}


def is_one_of(*allowed: Any) -> Condition:
    """Hold for these values, told apart from equal ones of another type (1 is not true)."""
    return lambda value: any(value == a and type(value) is type(a) for a in allowed)


def above(limit: float) -> Condition:
    """Hold for larger numbers."""
    return lambda value: isinstance(value, (int, float)) and value > limit


def divisible(by: int) -> Condition:
    """Hold for multiples of ``by``, ``by`` included."""
    return lambda value: isinstance(value, int) and value >= by and value % by == 0


def not_(condition: Condition) -> Condition:
    """Hold where ``condition`` does not."""
    return lambda value: not condition(value)


def _of(key: str, change: Callable[[int], int]) -> Callable[[Fields], Any]:
    return lambda fields: change(fields[key])


_STRATEGY = "config.strategy"
_MICRO = "workload.micro_batch"
_ACCUMULATION = "config.gradient_accumulation.steps"
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
_GATHER = "all-gathers of the parameters in backward"


def _checkpointing(mode: str, strength: int, before: tuple[str, ...], title: str) -> Move:
    return Move(
        name=f"checkpoint-{mode.replace('_', '-')}",
        title=title,
        family="checkpointing",
        strength=strength,
        when={_STRATEGY: _TORCH, _MODE: is_one_of(*before), "config.compile": is_one_of(False)},
        sets={_MODE: mode, **({_EVERY: 2} if mode == "every_n" else {})},
        saves="activations of blocks",
        costs=_RECOMPUTE,
    )


def _smaller_batch(divisor: int) -> Move:
    return Move(
        name=f"micro-batch-{divisor}",
        title=f"micro batch divided by {divisor}, {divisor} x the accumulation steps",
        family="micro-batch",
        strength=divisor,
        when={_STRATEGY: _TORCH, _MICRO: divisible(divisor)},
        sets={
            _MICRO: _of(_MICRO, lambda n: n // divisor),
            _ACCUMULATION: _of(_ACCUMULATION, lambda n: n * divisor),
        },
        saves="activations, logits",
        costs="smaller kernels; collectives of every micro step (the global batch stays)",
    )


def _fsdp1_sharding(target: str, strength: int, before: tuple[str, ...]) -> Move:
    hybrid = "HYBRID" in before[0]
    return Move(
        name=f"fsdp1-{target.lower().replace('_', '-')}" + ("-from-hybrid" if hybrid else ""),
        title=f"FSDP1 {target}",
        family="fsdp1-sharding",
        strength=strength,
        when={
            _STRATEGY: _FSDP1,
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
            _STRATEGY: _DDP,
            "config.ddp.comm_hook": is_one_of("none"),
            "config.ddp.find_unused_parameters": is_one_of(False),
            "config.precision.grad_scaler": is_one_of(False),
            "world_size": above(1),
        },
        sets={_STRATEGY: "fsdp2", "config.fsdp2.reshard_after_forward": True},
        saves="parameters, gradients and optimizer state: each rank keeps its shard",
        costs="all-gathers of the parameters in forward and backward",
    ),
    Move(
        name="expandable-segments",
        title="expandable segments in the allocator",
        family="allocator",
        when={_STRATEGY: _TORCH},
        environment=EXPANDABLE,
        saves="what fragmentation keeps reserved",
        costs="nothing per step once segments are mapped",
    ),
    Move(
        name="fused-optimizer",
        title="fused optimizer",
        family="optimizer-implementation",
        when={_STRATEGY: _TORCH, _IMPLEMENTATION: is_one_of("default", "foreach")},
        sets={_IMPLEMENTATION: "fused"},
        saves="temporaries of the foreach optimizer",
        costs="nothing: fewer kernels",
    ),
    Move(
        name="for-loop-optimizer",
        title="optimizer one parameter at a time",
        family="optimizer-implementation",
        strength=2,
        when={_STRATEGY: _TORCH, _IMPLEMENTATION: is_one_of("default", "foreach")},
        sets={_IMPLEMENTATION: "for_loop"},
        saves="temporaries of the foreach optimizer",
        costs="many small kernels in the optimizer's step",
    ),
    Move(
        name="bucket-views",
        title="gradients as views of DDP's buckets",
        family="bucket-views",
        when={
            _STRATEGY: _DDP,
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
            _STRATEGY: _FSDP2,
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
        when={_STRATEGY: _FSDP2, "config.fsdp2.mesh.replicate": above(1)},
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
        when={_STRATEGY: _FSDP1, "config.fsdp1.wrap": is_one_of("none")},
        sets={"config.fsdp1.wrap": "block"},
        saves="gathered parameters and gradients of all but a few blocks",
        costs="more and smaller collectives",
    ),
    Move(
        name="fsdp2-wrap-blocks",
        title="one FSDP2 unit for each block",
        family="wrap",
        when={_STRATEGY: _FSDP2, "config.fsdp2.wrap": is_one_of("none")},
        sets={"config.fsdp2.wrap": "block"},
        saves="gathered parameters and gradients of all but a few blocks",
        costs="more and smaller collectives",
    ),
    Move(
        name="fsdp2-one-block-per-unit",
        title="one block in each FSDP2 unit",
        family="wrap",
        when={
            _STRATEGY: _FSDP2,
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
        when={_STRATEGY: _FSDP1, "config.fsdp1.limit_all_gathers": is_one_of(False)},
        sets={"config.fsdp1.limit_all_gathers": True},
        saves="gathered parameters that the host runs ahead with",
        costs="the host waits for the GPU",
    ),
    Move(
        name="fsdp1-no-forward-prefetch",
        title="no forward prefetch",
        family="fsdp1-forward-prefetch",
        when={_STRATEGY: _FSDP1, "config.fsdp1.forward_prefetch": is_one_of(True)},
        sets={"config.fsdp1.forward_prefetch": False},
        saves="the next unit's gathered parameters",
        costs="all-gathers start later",
    ),
    Move(
        name="fsdp1-backward-prefetch-post",
        title="backward prefetch after the unit's own gradients",
        family="fsdp1-backward-prefetch",
        when={
            _STRATEGY: _FSDP1,
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
            _STRATEGY: is_one_of("fsdp1", "fsdp2"),
            _ACCUMULATION: above(1),
            _SYNC: is_one_of("last_microbatch"),
        },
        sets={_SYNC: "every_microbatch"},
        saves="unsharded gradients of the whole model",
        costs="one reduction of the gradients for each micro step",
    ),
    _checkpointing("selective", 1, ("none",), "selective activation checkpointing"),
    _checkpointing("every_n", 2, ("none",), "checkpoint every second block"),
    _checkpointing("full", 3, ("none", "selective", "every_n"), "checkpoint every block"),
    _smaller_batch(2),
    _smaller_batch(4),
    _smaller_batch(8),
    Move(
        name="fsdp2-reduce-bf16",
        title="reduce gradients in bfloat16",
        family="reduce-dtype",
        when={
            _STRATEGY: _FSDP2,
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
            _STRATEGY: _FSDP1,
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
            _STRATEGY: _FSDP2,
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
            _STRATEGY: _FSDP1,
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
        when={_STRATEGY: _DDP, **_IN_FLOAT32},
        sets={"config.precision.autocast": "bfloat16"},
        saves="half of many activations",
        costs="casts; matrix units are faster in bfloat16",
        numerics="rounding",
    ),
    Move(
        name="fsdp2-offload",
        title="parameters, gradients and optimizer on the host",
        family="offload",
        when={_STRATEGY: _FSDP2, "config.fsdp2.offload_policy": _NONE},
        sets={"config.fsdp2.offload_policy.pin_memory": True},
        saves="shards of parameters, gradients and optimizer state",
        costs="copies over PCIe each step, and the optimizer runs on the CPU",
    ),
    Move(
        name="fsdp1-offload",
        title="parameters, gradients and optimizer on the host",
        family="offload",
        when={
            _STRATEGY: _FSDP1,
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
            _STRATEGY: _TORCH,
            "config.precision.parameters": is_one_of("float32"),
            "config.precision.grad_scaler": is_one_of(False),
        },
        sets={"config.precision.parameters": "bfloat16"},
        saves="half of parameters, gradients and optimizer state",
        costs="small updates are lost to rounding: convergence must be looked at",
        numerics="precision",
    ),
)
"""In the order in which they are applied: an engine first, what acts under it after."""
