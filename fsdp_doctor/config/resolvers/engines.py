"""What DDP, FSDP1 and FSDP2 each make of their own arguments."""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.resolvers.fields import Fields
from fsdp_doctor.model.spec import MeshConfig, ProfileSpec

DEFAULT_BUCKET_BYTES = 25 << 20
"""torch/nn/parallel/distributed.py: _DEFAULT_BUCKET_CAP_MB = 25, in MiB."""
_STORAGE = "config.precision.parameters"
_STRATEGY = "config.strategy"
_RESHARDING = frozenset({"FULL_SHARD", "HYBRID_SHARD"})


def resolve_ddp(fields: Fields, spec: ProfileSpec) -> None:
    """DistributedDataParallel: every rank holds everything, gradients are all-reduced in buckets.

    Source: torch/nn/parallel/distributed.py (2.13).
    """
    path = "config.ddp"
    fields.take("sharding.strategy", _STRATEGY, "none", reason="DDP divides nothing")
    _group_sizes(fields, 1, spec.world_size, (_STRATEGY, "world_size"), "DDP divides nothing")
    cap = spec.config.ddp.bucket_cap_mb
    fields.take(
        "comm.bucket_bytes",
        f"{path}.bucket_cap_mb",
        DEFAULT_BUCKET_BYTES if cap is None else int(cap * (1 << 20)),
        reason="null: torch's default of 25 MiB" if cap is None else None,
    )
    fields.take("comm.bucket_view", f"{path}.gradient_as_bucket_view")
    fields.take("comm.hook", f"{path}.comm_hook")
    fields.take("ddp.static_graph", f"{path}.static_graph")
    fields.take("ddp.find_unused_parameters", f"{path}.find_unused_parameters")
    if spec.config.ddp.static_graph:
        fields.inert("ddp.find_unused_parameters", "static_graph finds unused parameters itself")
    _storage(fields)
    storage = fields.native(_STORAGE)
    fields.derive("precision.compute", storage, (_STORAGE,), "DDP computes in the stored dtype")
    fields.derive("precision.reduce", storage, (_STORAGE,), "DDP reduces the gradients' dtype")
    _no_offload(fields, "DDP keeps everything on the device")


def resolve_fsdp1(fields: Fields, spec: ProfileSpec) -> None:
    """FullyShardedDataParallel.

    Source: torch/distributed/fsdp/_init_utils.py (_init_core_state: one rank becomes NO_SHARD),
    _runtime_utils.py (_post_forward_reshard: the root is never resharded), _flat_param.py
    (_init_param_reduce_dtypes) (2.13).
    """
    fsdp1 = spec.config.fsdp1
    path = "config.fsdp1"
    _mesh_sizes(fields, spec, fsdp1.mesh, path)
    sharded = _fsdp1_strategy(fields, spec)
    fields.take("sharding.unit", f"{path}.wrap", "whole" if fsdp1.wrap == "none" else fsdp1.wrap)
    _fsdp1_precision(fields)
    _offload(
        fields,
        f"{path}.cpu_offload.offload_params",
        fsdp1.cpu_offload is not None and fsdp1.cpu_offload.offload_params,
    )
    names = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", None: "none"}
    fields.take("comm.prefetch_bwd", f"{path}.backward_prefetch", names[fsdp1.backward_prefetch])
    fields.take("comm.prefetch_fwd", f"{path}.forward_prefetch")
    fields.take("comm.limit_all_gathers", f"{path}.limit_all_gathers")
    fields.take("fsdp1.use_orig_params", f"{path}.use_orig_params")
    for key in ("comm.prefetch_bwd", "comm.prefetch_fwd", "comm.limit_all_gathers"):
        if not sharded:
            fields.inert(key, "nothing is gathered when nothing is sharded")
        elif fsdp1.wrap == "none":
            fields.inert(key, "there is one unit only, so there is no next unit to gather")


def _fsdp1_strategy(fields: Fields, spec: ProfileSpec) -> bool:
    """Set strategy and resharding; return whether anything is sharded."""
    native = "config.fsdp1.sharding_strategy"
    name = spec.config.fsdp1.sharding_strategy
    one_rank = fields.values["sharding.shard_size"].value == 1 and name != "NO_SHARD"
    sharded = name != "NO_SHARD" and not one_rank
    also = (_STRATEGY, *fields.values["sharding.shard_size"].native)
    fields.take("sharding.strategy", native, "optim_grads_params" if sharded else "none", also=also)
    if one_rank:
        fields.inert(
            "sharding.strategy", f"FSDP turns {name} into NO_SHARD when one rank holds the shard"
        )
    if not sharded:
        _group_sizes(
            fields, 1, spec.world_size, (native, _STRATEGY, "world_size"), "nothing is sharded"
        )
        return False
    natives = (native, _STRATEGY)
    fields.derive("sharding.reshard_after_forward", name in _RESHARDING, natives, f"{name} says so")
    fields.derive(
        "sharding.reshard_after_forward[root]",
        False,
        natives,
        "FSDP1 never reshards the root after forward",
    )
    return True


def _fsdp1_precision(fields: Fields) -> None:
    path = "config.fsdp1.mixed_precision"
    _storage(fields)
    storage = fields.native(_STORAGE)
    param, reduce = fields.native(f"{path}.param_dtype"), fields.native(f"{path}.reduce_dtype")
    _compute(fields, f"{path}.param_dtype")
    if reduce is not None:
        fields.take("precision.reduce", f"{path}.reduce_dtype")
    else:
        natives = (f"{path}.reduce_dtype", f"{path}.param_dtype", _STORAGE)
        reason = "no reduce_dtype: as the gradients are computed"
        fields.derive("precision.reduce", param or storage, natives, reason)
    fields.take("precision.buffer", f"{path}.buffer_dtype")
    keep = f"{path}.keep_low_precision_grads"
    fields.take(
        "fsdp1.keep_low_precision_grads",
        keep,
        bool(fields.native(keep)),
        also=(f"{path}.param_dtype",),
    )
    if param in (None, storage):
        fields.inert("fsdp1.keep_low_precision_grads", "gradients are in the stored dtype anyway")
    elif fields.native(keep):
        natives = (keep, f"{path}.param_dtype", _STORAGE)
        fields.derive("precision.grad", param, natives, "keep_low_precision_grads")


def resolve_fsdp2(fields: Fields, spec: ProfileSpec) -> None:
    """fully_shard.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_init.py (_get_post_forward_mesh_info),
    _fsdp_state.py (_lazy_init: an unset root is not resharded), _fsdp_param.py
    (init_dtype_attrs) (2.13).
    """
    fsdp2 = spec.config.fsdp2
    path = "config.fsdp2"
    fields.take(
        "sharding.strategy", _STRATEGY, "optim_grads_params", reason="fully_shard shards all three"
    )
    _mesh_sizes(fields, spec, fsdp2.mesh, path)
    shard_size = fields.values["sharding.shard_size"].value
    if shard_size == 1:
        fields.inert("sharding.strategy", "one rank holds the whole shard: nothing is divided")
    _fsdp2_reshard(fields, fsdp2.reshard_after_forward, shard_size)
    fields.take("sharding.unit", f"{path}.wrap", "whole" if fsdp2.wrap == "none" else fsdp2.wrap)
    fields.take("sharding.blocks_per_unit", f"{path}.blocks_per_unit")
    if fsdp2.wrap != "block":
        fields.inert("sharding.blocks_per_unit", "read with wrap: block only")
    _fsdp2_precision(fields)
    _offload(fields, f"{path}.offload_policy", fsdp2.offload_policy is not None)
    if fsdp2.offload_policy is not None:
        fields.take("offload.pin_memory", f"{path}.offload_policy.pin_memory")
    fields.derive(
        "comm.prefetch_bwd", "pre", (_STRATEGY,), "FSDP2 gathers the next unit during backward"
    )


def _fsdp2_reshard(fields: Fields, reshard: bool | int | None, shard_size: int) -> None:
    native = "config.fsdp2.reshard_after_forward"
    value: bool | int = True if reshard is None else reshard
    reason = "null: true, except for the root" if reshard is None else None
    if not isinstance(value, bool):
        if value == shard_size:
            value, reason = True, f"{shard_size} is the shard size: the same as true"
        elif value == 1:
            value, reason = False, "1 rank per group holds all: the same as false"
    fields.take("sharding.reshard_after_forward", native, value, reason=reason)
    fields.derive(
        "sharding.reshard_after_forward[root]",
        False if reshard is None else value,
        (native, _STRATEGY),
        "null: the root is not resharded" if reshard is None else "as written",
    )


def _fsdp2_precision(fields: Fields) -> None:
    path = "config.fsdp2.mp_policy"
    _storage(fields)
    storage = fields.native(_STORAGE)
    param, reduce = fields.native(f"{path}.param_dtype"), fields.native(f"{path}.reduce_dtype")
    _compute(fields, f"{path}.param_dtype")
    if reduce is not None:
        fields.take("precision.reduce", f"{path}.reduce_dtype")
    else:
        natives = (f"{path}.reduce_dtype", f"{path}.param_dtype", _STORAGE)
        fields.derive(
            "precision.reduce",
            param or storage,
            natives,
            "no reduce_dtype: as the gradients are computed",
        )
    fields.take("precision.output", f"{path}.output_dtype")
    cast = fields.native(f"{path}.cast_forward_inputs")
    fields.take("precision.cast_inputs", f"{path}.cast_forward_inputs", cast is not False)
    if param is None:
        fields.inert("precision.cast_inputs", "read with param_dtype only")


def _storage(fields: Fields) -> None:
    fields.take("precision.param_storage", _STORAGE)
    fields.derive(
        "precision.grad", fields.native(_STORAGE), (_STORAGE,), "as the stored parameters"
    )


def _compute(fields: Fields, path: str) -> None:
    if fields.native(path) is not None:
        fields.take("precision.compute", path)
    else:
        natives = (path, _STORAGE)
        fields.derive(
            "precision.compute", fields.native(_STORAGE), natives, "no param_dtype: as stored"
        )


def _mesh_sizes(fields: Fields, spec: ProfileSpec, mesh: MeshConfig | None, path: str) -> None:
    """Set shard and replicate size from a 2-D mesh, or from one dimension over all ranks."""
    if mesh is None:
        natives = ("world_size", _STRATEGY, f"{path}.mesh.shard")
        _group_sizes(fields, spec.world_size, 1, natives, "no mesh: one group of all ranks")
        return
    also: tuple[Any, ...] = (f"{path}.sharding_strategy",) if path == "config.fsdp1" else ()
    fields.take("sharding.shard_size", f"{path}.mesh.shard", also=also)
    fields.take("sharding.replicate_size", f"{path}.mesh.replicate", also=also)


def _group_sizes(
    fields: Fields, shard: int, replicate: int, natives: tuple[str, ...], reason: str
) -> None:
    fields.derive("sharding.shard_size", shard, natives, reason)
    fields.derive("sharding.replicate_size", replicate, natives, reason)


def _offload(fields: Fields, path: str, offloaded: bool) -> None:
    fields.take("offload.params", path, "cpu" if offloaded else "none")
    reason = "gradients and optimizer state live where the sharded parameters are"
    for name in ("grads", "optimizer"):
        fields.derive(f"offload.{name}", "cpu" if offloaded else "none", (path,), reason)


def _no_offload(fields: Fields, reason: str) -> None:
    for name in ("params", "grads", "optimizer"):
        fields.derive(f"offload.{name}", "none", (_STRATEGY,), reason)
