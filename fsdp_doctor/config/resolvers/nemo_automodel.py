"""NeMo Automodel: FSDP2, Megatron-FSDP or DDP around a Hugging Face model.

Source: nemo_automodel/components/distributed (config.py, fsdp2.py, megatron_fsdp.py) of 0.1 to 0.5.
"""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.loaders.megatron_flags import Version, parse_version
from fsdp_doctor.config.resolvers.fsdp2_fields import Fsdp2Keys, fsdp2_fields
from fsdp_doctor.config.resolvers.mcore_settings import Settings, dtype_name
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS = ("nemo-automodel",)
ASSUMED = {"nemo-automodel": "0.5.0"}
VERSIONS = {"nemo-automodel": ("0.1.0", "0.4.0", "0.5.0")}
_D = "distributed"
_IMPLS = {
    "fsdp2": "fsdp2",
    "megatron_fsdp": "megatron_fsdp",
    "megatron-fsdp": "megatron_fsdp",
    "mfsdp": "megatron_fsdp",
    "ddp": "ddp",
    "fsdp2manager": "fsdp2",
    "megatronfsdpmanager": "megatron_fsdp",
    "nvfsdpmanager": "megatron_fsdp",
    "ddpmanager": "ddp",
}
_ZERO = {0: "none", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
_DEFAULTS: dict[str, Any] = {
    f"{_D}.defer_fsdp_grad_sync": True,
    f"{_D}.enable_fsdp2_prefetch": False,
    f"{_D}.zero_dp_strategy": 3,
    f"{_D}.overlap_grad_reduce": True,
    f"{_D}.overlap_param_gather": True,
    f"{_D}.grad_reduce_in_fp32": False,
    f"{_D}.preserve_fp32_weights": False,
    "checkpoint.model_save_format": "safetensors",
    "step_scheduler.local_batch_size": 1,
}
_KEYS = Fsdp2Keys(
    switch=f"{_D}.strategy",
    tensor=f"{_D}.tp_size",
    context=f"{_D}.cp_size",
    sequence=f"{_D}.sequence_parallel",
    replicate=f"{_D}.dp_replicate_size",
    offload=f"{_D}.offload_policy",
    recompute=f"{_D}.activation_checkpointing",
    micro="step_scheduler.local_batch_size",
    whole="step_scheduler.global_batch_size",
    length="packed_sequence.packed_sequence_size",
    optimizer="optimizer._target_",
    clip="clip_grad_norm.max_norm",
    precision="model.torch_dtype",
)


def resolve(native: NativeConfig, version: str) -> EffectiveConfig:
    """Return what Automodel of a version makes of a config, of either generation."""
    numbers = parse_version(version)
    older = f"{_D}.strategy" not in native.fields and f"{_D}._target_" in native.fields
    paths = {_KEYS.switch: f"{_D}._target_"} if older else {}
    settings = Settings(native, numbers, _DEFAULTS.get, paths)
    impl = _engine(settings)
    fsdp2_fields(settings, _KEYS, reduce="float32", impl=impl)
    if impl == "fsdp2":
        _fsdp2(settings, numbers)
    elif impl == "megatron_fsdp":
        _megatron_fsdp(settings)
    else:
        _ddp(settings)
    _others(settings)
    return settings.finish(version)


def _engine(settings: Settings) -> str:
    name = str(settings.get(_KEYS.switch) or "fsdp2").rpartition(".")[2].lower()
    return _IMPLS.get(name, name)


def _fsdp2(settings: Settings, version: Version) -> None:
    """Source: config.py: without a policy the reduction is float32 since 0.5, bf16 before."""
    given = settings.get(f"{_D}.mp_policy.reduce_dtype")
    default = "float32" if version >= (0, 5) else "bfloat16"
    policy = f"{_D}.mp_policy.reduce_dtype"
    why = f"no mp_policy: {default} in this version" if given is None else None
    settings.take("precision.reduce", policy, dtype_name(given) or default, reason=why)
    deferred = settings.on(f"{_D}.defer_fsdp_grad_sync")
    sync = "last_microbatch" if deferred else "every_microbatch"
    settings.take("comm.grad_sync", f"{_D}.defer_fsdp_grad_sync", sync)
    prefetch = settings.on(f"{_D}.enable_fsdp2_prefetch")
    settings.take("comm.prefetch_fwd", f"{_D}.enable_fsdp2_prefetch", prefetch)
    depths = (f"{_D}.fsdp2_backward_prefetch_depth", f"{_D}.fsdp2_forward_prefetch_depth")
    if not prefetch:
        settings.ignore(depths, "read with enable_fsdp2_prefetch only")
    given = settings.get(f"{_D}.reshard_after_forward")
    pipelined = (settings.number(f"{_D}.pp_size") or 1) > 1
    reshard = (not pipelined) if given is None else given
    why = "not set: off with pipeline stages, else all but the last layer"
    settings.take(
        "sharding.reshard_after_forward",
        f"{_D}.reshard_after_forward",
        reshard,
        also=(f"{_D}.pp_size",),
        reason=why if given is None else None,
    )


def _megatron_fsdp(settings: Settings) -> None:
    zero = settings.get(f"{_D}.zero_dp_strategy")
    strategy = _ZERO.get(zero, str(zero)) if isinstance(zero, int) else str(zero)
    settings.take("sharding.strategy", f"{_D}.zero_dp_strategy", strategy)
    fp32 = settings.on(f"{_D}.grad_reduce_in_fp32")
    dtype = "float32" if fp32 else settings.fields["precision.compute"].value
    for key in ("precision.grad", "precision.reduce"):
        settings.take(key, f"{_D}.grad_reduce_in_fp32", dtype)
    kept = settings.on(f"{_D}.preserve_fp32_weights")
    settings.take("precision.master", f"{_D}.preserve_fp32_weights", "float32" if kept else "none")
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        settings.take(f"comm.{name}", f"{_D}.{name}", settings.on(f"{_D}.{name}"))
    settings.ignore((f"{_D}.check_for_nan_in_grad",), "not read by Automodel's Megatron-FSDP")


def _ddp(settings: Settings) -> None:
    settings.derive("sharding.strategy", "none", (_KEYS.switch,), "DDP divides nothing")
    settings.derive("sharding.shard_size", 1, (_KEYS.switch,), "DDP divides nothing")
    for key in ("sharding.reshard_after_forward", "sharding.reshard_after_forward[root]"):
        del settings.fields[key]


def _others(settings: Settings) -> None:
    settings.take("ckpt.format", "checkpoint.model_save_format")
    for key, name in (("pp", "pp_size"), ("ep", "ep_size")):
        settings.take(f"parallel.{key}", f"{_D}.{name}", settings.number(f"{_D}.{name}") or 1)
    if settings.field(f"{_D}.dp_size") is not None:
        size = settings.number(f"{_D}.dp_size")
        settings.take("parallel.dp", f"{_D}.dp_size", size)
    settings.take("optimizer.learning_rate", "optimizer.lr")
    settings.take("optimizer.weight_decay", "optimizer.weight_decay")
    enabled = settings.field("checkpoint.enabled")
    if enabled is not None and enabled.value is False:
        settings.inert("ckpt.format", "checkpoint.enabled is off")
