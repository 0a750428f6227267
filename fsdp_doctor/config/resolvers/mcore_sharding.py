"""Engine, shards and communication of a Megatron job, as canonical fields."""

from __future__ import annotations

from dataclasses import replace

from fsdp_doctor.config.resolvers.mcore_rules import engine, strategy
from fsdp_doctor.config.resolvers.mcore_settings import Settings

UNIT_FLOOR = 1_000_000_000
"""megatron_fsdp.py to 0.19.2: ``max(1_000_000_000, derived)`` elements when nothing is set."""
_LEAST_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000
_WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_ENGINE = ("use_megatron_fsdp", "use_distributed_optimizer", "use_torch_fsdp2", "use_custom_fsdp")
_STRATEGY = (*_ENGINE, "data_parallel_sharding_strategy")
_GROUP = ("num_distributed_optimizer_instances", *_STRATEGY)
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def sharding_fields(settings: Settings) -> None:
    """Set ``sharding.*`` and ``world.size``."""
    kind = engine(settings)
    switch = {
        "megatron_fsdp": "use_megatron_fsdp",
        "mcore_torch_fsdp2": "use_torch_fsdp2",
    }.get(kind, "use_distributed_optimizer")
    settings.claim(*_ENGINE)
    settings.take("sharding.impl", switch, kind, also=_ENGINE)
    name = strategy(settings)
    fsdp = kind == "megatron_fsdp"
    path = "data_parallel_sharding_strategy" if fsdp else switch
    settings.take("sharding.strategy", path, name, also=_ENGINE)
    _written_by_switch(settings)
    _group_sizes(settings, name)
    if kind == "mcore_torch_fsdp2":
        settings.take("sharding.reshard_after_forward", "torch_fsdp2_reshard_after_forward")
    elif kind == "megatron_fsdp" and name == "optim_grads_params":
        why = "Megatron-FSDP frees a unit after its forward"
        settings.derive("sharding.reshard_after_forward", True, _STRATEGY, why)
    if kind == "megatron_fsdp":
        outer = settings.get("outer_dp_sharding_strategy")
        settings.take(
            "sharding.outer", "outer_dp_sharding_strategy", "none" if outer == "no_shard" else outer
        )
        instances = settings.number("num_distributed_optimizer_instances") or 1
        if instances == 1 or name != "optim_grads_params":
            settings.inert(
                "sharding.outer", "acts with optim_grads_params and several instances only"
            )


def _written_by_switch(settings: Settings) -> None:
    """Count engine and strategy as written by the switch that decides on both."""
    engine_field = settings.fields["sharding.impl"]
    if engine_field.written is None:
        return
    strategy_field = settings.fields["sharding.strategy"]
    settings.fields["sharding.impl"] = replace(engine_field, written=engine_field.value)
    settings.fields["sharding.strategy"] = replace(
        strategy_field,
        source=engine_field.source if strategy_field.written is None else strategy_field.source,
        written=strategy_field.value,
    )


def _group_sizes(settings: Settings, name: str) -> None:
    instances = settings.number("num_distributed_optimizer_instances") or 1
    settings.claim("num_distributed_optimizer_instances")
    settings.take("sharding.instances", "num_distributed_optimizer_instances", instances)
    if name == "none":
        settings.inert("sharding.instances", "nothing is divided among the data-parallel ranks")
    ranks = data_parallel_ranks(settings, with_context=True)
    whole = ranks is None or name == "none"
    shard = 1 if name == "none" else None if whole or ranks is None else max(ranks // instances, 1)
    natives = (*_GROUP, "world_size", "launcher.nproc_per_node", "launcher.nnodes", *_SIZES[:2])
    why = "data- and context-parallel ranks / optimizer instances"
    settings.derive("sharding.shard_size", shard, natives, why)
    copies = None if ranks is None or shard is None else max(ranks // shard, 1)
    settings.derive("sharding.replicate_size", copies, natives, "ranks that hold the same shard")


def data_parallel_ranks(settings: Settings, *, with_context: bool) -> int | None:
    """Return the data-parallel size, times the context-parallel one, or None when not known."""
    world = world_size(settings)
    sizes = [settings.number(name) or 1 for name in _SIZES]
    product = sizes[0] * sizes[1] * (1 if with_context else sizes[2])
    if world is None:
        size = settings.number("data_parallel_size")
        return size if size is None or not with_context else size * sizes[2]
    return world // product if world >= product else None


def world_size(settings: Settings) -> int | None:
    """Return the number of processes, given or from the launcher's options."""
    world = settings.number("world_size")
    if world is not None:
        return world
    total = settings.number("launcher.num_gpus")
    if total is not None:
        return total
    per_node = settings.number("launcher.nproc_per_node")
    return None if per_node is None else per_node * (settings.number("launcher.nnodes") or 1)


def communication_fields(settings: Settings) -> None:
    """Set ``comm.*``."""
    kind, name = engine(settings), strategy(settings)
    for key, setting in _SWITCHES.items():
        settings.take(key, setting, settings.on(setting))
    if name == "none" and kind == "megatron_ddp":
        settings.inert("comm.overlap_param_gather", "no parameters are gathered")
    _bucket(settings, kind)
    fsdp = kind == "megatron_fsdp"
    for key, setting in _FSDP_SWITCHES.items():
        settings.take(key, setting, settings.on(setting))
        if not fsdp:
            settings.inert(key, "Megatron-FSDP only")
    unit = settings.number("suggested_communication_unit_size")
    why = None if unit is not None else "not set: never less than 1e9 elements (to 0.19)"
    settings.take(
        "comm.unit_elems", "suggested_communication_unit_size", unit or UNIT_FLOOR, reason=why
    )
    if not fsdp or name not in ("optim_grads", "optim_grads_params"):
        settings.inert("comm.unit_elems", "Megatron-FSDP with divided gradients only")
    every = (fsdp and name.startswith("optim_grads")) or kind == "mcore_torch_fsdp2"
    settings.derive(
        "comm.grad_sync",
        "every_microbatch" if every else "last_microbatch",
        _STRATEGY,
        "divided gradients are reduced after each micro batch, whole ones after the last",
    )


def _bucket(settings: Settings, kind: str) -> None:
    elements = settings.number("ddp_bucket_size")
    width = _WIDTHS.get(str(gradient_dtype(settings)), 4)
    overlapped = settings.on("overlap_grad_reduce")
    why = "elements x bytes of a gradient"
    if not overlapped and kind in ("megatron_ddp", "megatron_distopt"):
        why = "one bucket: overlap_grad_reduce is off"
        settings.derive("comm.bucket_bytes", None, ("overlap_grad_reduce",), why)
        settings.claim("ddp_bucket_size")
        return
    if elements is None:
        ranks = data_parallel_ranks(settings, with_context=True)
        elements = None if ranks is None else max(_LEAST_BUCKET, _BUCKET_PER_RANK * ranks)
        why = "not set: max(40e6, 1e6 x data-parallel ranks) elements"
    size = None if elements is None else elements * width
    also = (
        "overlap_grad_reduce",
        "use_megatron_fsdp",
        "bf16",
        "grad_reduce_in_bf16",
        "world_size",
        "accumulate_allreduce_grads_in_fp32",
    )
    settings.take("comm.bucket_bytes", "ddp_bucket_size", size, also=also, reason=why)
    if kind == "mcore_torch_fsdp2":
        settings.inert("comm.bucket_bytes", "torch FSDP2 has no buckets")


def gradient_dtype(settings: Settings) -> str:
    """Return the dtype of the main gradients, which the optimizer reads."""
    compute = compute_dtype(settings)
    if engine(settings) == "mcore_torch_fsdp2":
        return compute
    fp32 = settings.on("accumulate_allreduce_grads_in_fp32")
    if engine(settings) != "megatron_fsdp":
        return "float32" if fp32 else compute
    named = settings.dtype("megatron_fsdp_main_grads_dtype")
    if settings.version < (0, 19) and fp32:
        return "float32"
    return compute if named in (None, "auto", "none") else str(named)


def compute_dtype(settings: Settings) -> str:
    """Return the dtype that forward and backward run in, fp8 apart."""
    return "bfloat16" if settings.on("bf16") else "float16" if settings.on("fp16") else "float32"


_SWITCHES = {
    "comm.overlap_grad_reduce": "overlap_grad_reduce",
    "comm.overlap_param_gather": "overlap_param_gather",
    "comm.average_in_collective": "ddp_average_in_collective",
    "comm.user_buffers": "nccl_ub",
    "comm.align_param_gather": "align_param_gather",
    "comm.pad_buckets": "ddp_pad_buckets_for_high_nccl_busbw",
    "comm.reduce_scatter_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "comm.tp_overlap": "tp_comm_overlap",
    "comm.p2p_overlap": "overlap_p2p_comm",
}
_FSDP_SWITCHES = {
    "comm.double_buffer": "fsdp_double_buffer",
    "comm.manual_registration": "fsdp_manual_registration",
}
