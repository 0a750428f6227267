"""Fields that frameworks around torch have: buckets and thresholds, parallel sizes, optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_doctor.config.effects.base import (
    ACTIVATIONS,
    FSDP1,
    GUESS,
    OPTIM,
    ZERO,
    EffectContext,
    EffectRule,
    TimeRule,
    computed,
    effect,
    opposite,
    rises,
)
from fsdp_doctor.model.config import ConfigChange, Direction, Effect, StepTimeEffect
from fsdp_doctor.model.memory import Category, Phase

DEEPSPEED = "deepspeed/runtime/zero/stage_1_and_2.py, stage3.py (0.19)"
_STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
_MODEL = (
    *_STATES,
    Category.UNSHARDED_PARAMETERS,
    Category.UNSHARDED_GRADIENTS,
    Category.COMMUNICATION,
    Category.ACTIVATIONS,
    Category.LOGITS,
    Category.TEMPORARIES,
)


def _numbers(change: ConfigChange) -> Direction:
    """Return which way a number moves, unset being none; words such as ``auto`` leave it open."""
    values = (change.a.value, change.b.value)
    known = all(value is None or isinstance(value, (int, float)) for value in values)
    return rises(change) if known else "either"


def _grows(
    *categories: Category, why: str, source: str = GUESS, phase: Phase | None = None
) -> EffectRule:
    """Return a rule: the categories follow the number."""

    def rule(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
        way = _numbers(change)
        return tuple(effect(category, way, why, source, phase=phase) for category in categories)

    return rule


def _shrinks(*categories: Category, why: str, source: str = GUESS) -> EffectRule:
    """Return a rule: the categories fall when the number or switch rises."""

    def rule(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
        way = opposite(_numbers(change))
        return tuple(effect(category, way, why, source) for category in categories)

    return rule


def _open(*categories: Category, why: str) -> EffectRule:
    """Return a rule: the categories move, the direction is not known."""

    def rule(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
        return tuple(effect(category, "either", why) for category in categories)

    return rule


def _nothing(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    """No memory on the device changes."""
    return ()


def _bits(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    why = "bits of each element of the optimizer's state"
    return (computed(context, Category.OPTIMIZER_STATE, rises(change), why, OPTIM),)


def _master(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    way: Direction = "up" if change.b.set else "down"
    why = "a full-precision copy of the parameters for the optimizer"
    return (computed(context, Category.OPTIMIZER_STATE, way, why, ZERO),)


def _fused(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    way: Direction = "down" if change.b.value else "up"
    why = "a fused step needs no scratch, foreach needs as much as the shard"
    return (computed(context, Category.TEMPORARIES, way, why, OPTIM, phase=Phase.OPTIMIZER),)


def _time(way: Direction | None, reason: str) -> TimeRule:
    """Return a time rule; None: it rises with the number."""

    def rule(change: ConfigChange, context: EffectContext) -> StepTimeEffect:  # noqa: ARG001
        return StepTimeEffect(direction=_numbers(change) if way is None else way, reason=reason)

    return rule


def _falls(reason: str) -> TimeRule:
    def rule(change: ConfigChange, context: EffectContext) -> StepTimeEffect:  # noqa: ARG001
        return StepTimeEffect(direction=opposite(_numbers(change)), reason=reason)

    return rule


_BUFFER = "a persistent buffer of this size, two with overlap"
_DIVIDES = "weights and activations are divided among these ranks"
_UNIT = "gathered units grow"


def _all(keys: Sequence[str], rule: EffectRule) -> dict[str, EffectRule]:
    return dict.fromkeys(keys, rule)


RULES: dict[str, EffectRule] = {
    "comm.allgather_bucket_bytes": _grows(Category.COMMUNICATION, why=_BUFFER, source=DEEPSPEED),
    "comm.prefetch_bucket_bytes": _grows(
        Category.UNSHARDED_PARAMETERS, why="parameters gathered ahead", source=DEEPSPEED
    ),
    "sharding.persist_threshold": _grows(
        Category.UNSHARDED_PARAMETERS, why="smaller parameters stay whole", source=DEEPSPEED
    ),
    "sharding.max_live_parameters": _grows(
        Category.UNSHARDED_PARAMETERS, why="most elements gathered at a time", source=DEEPSPEED
    ),
    "sharding.max_reuse_distance": _grows(
        Category.UNSHARDED_PARAMETERS, why="parameters used again soon stay", source=DEEPSPEED
    ),
    "sharding.secondary_partition": _shrinks(
        Category.UNSHARDED_PARAMETERS,
        why="a second half-precision copy, divided among these ranks; none at 1",
        source="ZeRO++, Wang et al. 2023, arXiv:2306.10209",
    ),
    "sharding.mics_shard_size": _shrinks(
        *_STATES, why="ranks that hold one copy", source=DEEPSPEED
    ),
    "sharding.flat_params": _open(
        Category.PARAMETERS,
        Category.GRADIENTS,
        Category.OPTIMIZER_STATE,
        Category.TEMPORARIES,
        why="padding per unit (flat) or per parameter",
    ),
    "sharding.shard_degree": _open(*_STATES, why="ranks that share one copy"),
    "sharding.extra_units": _open(
        Category.UNSHARDED_PARAMETERS, Category.UNSHARDED_GRADIENTS, why="more, smaller units"
    ),
    "sharding.reshard_after_forward[last]": _shrinks(
        Category.UNSHARDED_PARAMETERS, why="norm and output are freed after forward", source=FSDP1
    ),
    "sharding.num_buffers": _grows(Category.COMMUNICATION, why=_BUFFER),
    **_all(
        ("parallel.tp", "parallel.etp"),
        _shrinks(*_STATES, Category.ACTIVATIONS, Category.LOGITS, why=_DIVIDES, source=ACTIVATIONS),
    ),
    "parallel.pp": _shrinks(*_STATES, why="layers are divided among these ranks"),
    "parallel.ep": _shrinks(*_STATES, why="experts are divided among these ranks"),
    **_all(
        ("parallel.cp", "parallel.sp"),
        _shrinks(Category.ACTIVATIONS, Category.LOGITS, why="each rank has a part of the sequence"),
    ),
    "parallel.pp_schedule": _open(Category.ACTIVATIONS, why="other micro batches in flight"),
    **_all(("model.name", "model.flavor", "model.lora"), _open(*_MODEL, why="another model")),
    "model.finetuning": _open(*_STATES, why="other parameters are trained"),
    "model.lora_rank": _grows(*_STATES, why="elements of the adapters"),
    "model.quantization_bits": _open(Category.PARAMETERS, why="bits of each frozen element"),
    "comm.float8_all_gather": _shrinks(Category.COMMUNICATION, why="gathers carry 8-bit elements"),
    "batch.micro_tokens": _grows(
        Category.ACTIVATIONS, Category.LOGITS, Category.TEMPORARIES, why="tokens of a micro batch"
    ),
    "batch.packing": _open(Category.ACTIVATIONS, Category.LOGITS, why="other tokens in a batch"),
    "batch.dynamic": _open(Category.ACTIVATIONS, Category.LOGITS, why="other tokens in a batch"),
    "batch.pad_to_sequence_len": _grows(
        Category.ACTIVATIONS, Category.LOGITS, why="short samples are padded to full length"
    ),
    "batch.global": _nothing,
    "kernels.use_kernels": _open(Category.ACTIVATIONS, Category.TEMPORARIES, why="other kernels"),
    "optimizer.bits": _bits,
    "optimizer.fused": _fused,
    "optimizer.foreach": _grows(
        Category.TEMPORARIES, why="scratch for all parameters at once", phase=Phase.OPTIMIZER
    ),
    "optimizer.in_backward": _shrinks(Category.GRADIENTS, why="gradients are freed one by one"),
    "optimizer.sub_group_size": _grows(
        Category.TEMPORARIES, why="elements stepped on at a time", phase=Phase.OPTIMIZER
    ),
    "offload.optimizer_mode": _open(Category.OPTIMIZER_STATE, why="what of the optimizer moves"),
    "offload.fraction": _shrinks(Category.OPTIMIZER_STATE, why="share of the state on the host"),
    "offload.idle_params": _nothing,
    "offload.idle_optimizer": _nothing,
    "offload.round_robin_gradients": _nothing,
    "precision.master": _master,
    "precision.bf16_check_overflow": _nothing,
    "recompute.reentrant": _open(
        Category.ACTIVATIONS, why="reentrant checkpoints save inputs only"
    ),
    "recompute.partition_activations": _shrinks(
        Category.ACTIVATIONS, why="saved activations are divided among tensor-parallel ranks"
    ),
    "recompute.memory_budget": _grows(
        Category.ACTIVATIONS, why="share of activations that is saved"
    ),
    "comm.overlap_grad_reduce": _grows(
        Category.COMMUNICATION, why="a second bucket is in flight", source=DEEPSPEED
    ),
    "comm.contiguous_gradients": _grows(
        Category.COMMUNICATION, why="gradients are copied into one buffer", source=DEEPSPEED
    ),
    "comm.reduce_scatter": _open(Category.COMMUNICATION, why="an all-reduce keeps whole gradients"),
    "comm.allgather_partitions": _nothing,
    "comm.quantized_weights": _open(Category.COMMUNICATION, why="int8 copies on the wire"),
    "comm.quantized_gradients": _open(Category.COMMUNICATION, why="int4 copies on the wire"),
    "comm.async_tp": _open(Category.COMMUNICATION, why="symmetric-memory buffers"),
    "ckpt.gather_16bit": _nothing,
    "ckpt.state_dict": _nothing,
    "ckpt.enabled": _nothing,
    "ckpt.async": _nothing,
    "env.cuda_device_max_connections": _nothing,
    "world.devices": _open(*_STATES, why="another number of ranks"),
    "world.nodes": _open(*_STATES, why="another number of ranks"),
}
TIMES: dict[str, TimeRule] = {
    "comm.allgather_bucket_bytes": _time(
        "either", "small buckets cost latency, large overlap less"
    ),
    "comm.prefetch_bucket_bytes": _falls("more is gathered ahead of its use"),
    "sharding.persist_threshold": _falls("fewer tiny gathers"),
    "sharding.secondary_partition": _time("either", "backward gathers stay among these ranks"),
    "sharding.flat_params": _time("either", "views and copies differ"),
    "parallel.tp": _time("either", "less compute per rank, collectives in every layer"),
    "parallel.pp": _time("either", "less compute per rank, bubbles between stages"),
    "parallel.cp": _time("either", "less compute per rank, keys and values are exchanged"),
    "parallel.ep": _time("either", "tokens are exchanged among experts"),
    "model.name": _time("either", "another model"),
    "model.flavor": _time("either", "another model"),
    "batch.micro_tokens": _time(None, "more to compute"),
    "batch.global": _time("either", "another number of micro steps"),
    "optimizer.bits": _time("either", "less to read and write, but more arithmetic"),
    "optimizer.fused": _falls("one kernel for all"),
    "offload.idle_params": _time("either", "parameters move between phases"),
    "offload.idle_optimizer": _time("either", "state moves between phases"),
    "precision.fp8": _falls("8-bit matmuls are faster, casts are added"),
    "precision.bf16_check_overflow": _time(None, "gradients are checked each step"),
    "comm.overlap_grad_reduce": _falls("reduction runs beside backward"),
    "comm.async_tp": _falls("tensor-parallel collectives are hidden"),
    "ckpt.gather_16bit": _time("none", "saving gathers all parameters; steps do not"),
    "env.cuda_device_max_connections": _time("either", "order of kernels among streams"),
    "recompute.partition_activations": _time(None, "saved activations are gathered in backward"),
    "kernels.use_kernels": _time("either", "other kernels"),
}
