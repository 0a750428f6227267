"""The standalone ``megatron_fsdp`` package (0.6): what a spec's fields come to."""

from __future__ import annotations

from fsdp_doctor.config.resolvers.fields import Fields
from fsdp_doctor.model.spec import ProfileSpec

_PATH = "config.megatron_fsdp"
_STORAGE = "config.precision.parameters"
_SHARDED = ("optim_grads", "optim_grads_params")


def resolve_megatron_fsdp(fields: Fields, spec: ProfileSpec) -> None:
    """Set ``sharding.*``, ``comm.*``, ``precision.*`` and ``offload.*``."""
    config = spec.config.megatron_fsdp
    strategy, native = config.zero_dp_strategy, f"{_PATH}.zero_dp_strategy"
    shown = "none" if strategy == "no_shard" else strategy
    fields.take("sharding.strategy", native, shown)
    fields.take("sharding.unit", f"{_PATH}.wrap", "whole" if config.wrap == "none" else config.wrap)
    shard = 1 if strategy == "no_shard" else spec.world_size
    fields.derive("sharding.shard_size", shard, (native, "world_size"), "one group of all ranks")
    fields.derive("sharding.replicate_size", spec.world_size // shard, (native,), "the other ranks")
    fields.take("comm.overlap_grad_reduce", f"{_PATH}.overlap_grad_reduce")
    fields.take("comm.overlap_param_gather", f"{_PATH}.overlap_param_gather")
    if strategy in _SHARDED:
        why = f"forced by {strategy}"
        fields.derive("comm.overlap_grad_reduce", True, (native,), why)
    if strategy == "optim_grads_params":
        fields.derive("comm.overlap_param_gather", True, (native,), f"forced by {strategy}")
    fields.take("comm.average_in_collective", f"{_PATH}.average_in_collective")
    fields.take("comm.double_buffer", f"{_PATH}.fsdp_double_buffer")
    _precision(fields, spec)
    for name in ("params", "grads", "optimizer"):
        fields.derive(f"offload.{name}", "none", (native,), "it has no CPU offload")


def _precision(fields: Fields, spec: ProfileSpec) -> None:
    config, storage = spec.config.megatron_fsdp, spec.config.precision.parameters
    fields.take("precision.param_storage", _STORAGE)
    fields.derive("precision.compute", storage, (_STORAGE,), "as the model was built")
    main = config.main_params_dtype
    master = "none" if main is None or main == storage else main
    fields.take("precision.master", f"{_PATH}.main_params_dtype", master, also=(_STORAGE,))
    grads = config.main_grads_dtype or storage
    fields.take("precision.grad", f"{_PATH}.main_grads_dtype", grads, also=(_STORAGE,))
    reduce = config.grad_comm_dtype or grads
    fields.take("precision.reduce", f"{_PATH}.grad_comm_dtype", reduce, also=(_STORAGE,))
