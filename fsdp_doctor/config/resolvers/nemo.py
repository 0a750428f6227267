"""NeMo 1 and NeMo 2, which train through Megatron-Core.

Source: nemo/collections/nlp/modules/common/megatron and nemo/lightning/pytorch/strategies of
NeMo 1.23 to 2.4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_doctor.config.loaders.megatron_flags import flag_table
from fsdp_doctor.config.resolvers.mcore import resolve_mcore
from fsdp_doctor.config.resolvers.mcore_settings import Settings, dtype_name
from fsdp_doctor.config.resolvers.nemo_names import paths_in
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS = ("nemo",)
ASSUMED = {"nemo": "2.4.0"}
CORE = (0, 13)
"""Megatron-Core that NeMo 2.3 and 2.4 come with."""
_DISTRIBUTED = ("distributed_fused_adam", "mcore_distributed_optim")
_FSDP1 = {
    "full": ("optim_grads_params", True),
    "hybrid": ("optim_grads_params", True),
    "grad": ("optim_grads_params", False),
}
_MEBIBYTE = 1 << 20


def resolve(native: NativeConfig, version: str) -> EffectiveConfig:
    """Return what NeMo makes of a config; its Megatron settings by the rules of Megatron-Core."""
    paths = paths_in(native.fields)
    values: dict[str, Any] = {}
    _optimizer(native, paths, values)
    _precision(native, paths, values)
    _engine(native, paths, values)
    _shape(native, paths, values)
    settings = Settings(native, CORE, default_of, paths, values)
    world = _world(native)
    if world is not None:
        settings.redirect("world_size", "trainer.devices", world, "devices x nodes")
        settings.join("world_size", "trainer.num_nodes")
    resolve_mcore(settings)
    _bucket(settings)
    _fsdp1(settings)
    return settings.finish(version)


def default_of(name: str) -> Any:
    """Return the default of a setting that NeMo hands to Megatron-Core's own classes."""
    if name in _OFF:
        return False
    flag = flag_table().get(name)
    return None if flag is None else flag.default(CORE)


_OFF = frozenset({"gradient_accumulation_fusion", "align_param_gather", "overlap_p2p_comm"})
"""On for Megatron-LM's command line, off in Megatron-Core's classes."""


def _value(native: NativeConfig, *keys: str) -> tuple[str, Any] | None:
    for key in keys:
        found = native.fields.get(key)
        if found is not None and found.value is not None:
            return key, found.value
    return None


def _optimizer(native: NativeConfig, paths: dict[str, str], values: dict[str, Any]) -> None:
    named = _value(native, "model.optim.name")
    if named is None:
        return
    path, name = named
    paths["use_distributed_optimizer"] = path
    values["use_distributed_optimizer"] = name in _DISTRIBUTED
    paths["optimizer"] = path
    values["optimizer"] = "sgd" if "sgd" in str(name) else "adam"
    overlaps = {
        "overlap_grad_reduce": "model.optim.overlap_grad_sync",
        "overlap_param_gather": "model.optim.overlap_param_sync",
    }
    paths |= {name: key for name, key in overlaps.items() if key in native.fields}


def _precision(native: NativeConfig, paths: dict[str, str], values: dict[str, Any]) -> None:
    found = _value(native, "trainer.precision", "trainer.plugins.precision")
    if found is None:
        return
    path, precision = found
    dtype = dtype_name(str(precision).replace("_", "-"))
    paths |= {"bf16": path, "fp16": path}
    values |= {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    level = native.fields.get("model.megatron_amp_O2")
    if level is not None and "accumulate_allreduce_grads_in_fp32" not in paths:
        paths["accumulate_allreduce_grads_in_fp32"] = "model.megatron_amp_O2"
        values["accumulate_allreduce_grads_in_fp32"] = bool(level.value)
    fp8 = native.fields.get("model.fp8")
    if fp8 is not None and isinstance(fp8.value, bool):
        hybrid = native.fields.get("model.fp8_hybrid")
        name = "hybrid" if hybrid is not None and hybrid.value else "e4m3"
        values["fp8"] = name if fp8.value else None


def _engine(native: NativeConfig, paths: dict[str, str], values: dict[str, Any]) -> None:
    """NeMo 2: ``strategy.fsdp`` is null, megatron or pytorch."""
    found = _value(native, "trainer.strategy.fsdp", "strategy.fsdp")
    if found is None:
        return
    path, kind = found
    name = "use_megatron_fsdp" if kind == "megatron" else "use_torch_fsdp2"
    paths[name] = path
    values[name] = True


def _shape(native: NativeConfig, paths: dict[str, str], values: dict[str, Any]) -> None:
    activation = _value(native, "model.activation")
    if activation is not None:
        values["swiglu"] = "glu" in str(activation[1])
    shared = native.fields.get(paths.get("untie_embeddings_and_output_weights", ""))
    if shared is not None:
        values["untie_embeddings_and_output_weights"] = not shared.value


def _world(native: NativeConfig) -> int | None:
    devices = _value(native, "trainer.devices")
    nodes = _value(native, "trainer.num_nodes")
    if devices is None or not isinstance(devices[1], int) or devices[1] < 1:
        return None
    count = 1 if nodes is None else nodes[1]
    return devices[1] * count if isinstance(count, int) and count > 0 else None


def _bucket(settings: Settings) -> None:
    """NeMo 1 states bucket sizes in MiB, per optimizer or for plain data parallelism."""
    distributed = settings.on("use_distributed_optimizer")
    name = "model.optim.bucket_cap_mb" if distributed else "model.grad_allreduce_chunk_size_mb"
    other = "model.grad_allreduce_chunk_size_mb" if distributed else "model.optim.bucket_cap_mb"
    found = settings.native.fields.get(name)
    if found is not None and isinstance(found.value, (int, float)):
        settings.take("comm.bucket_bytes", name, int(found.value * _MEBIBYTE))
    settings.ignore((other,), f"{name} is read with this optimizer")


def _fsdp1(settings: Settings) -> None:
    """NeMo 1 with ``fsdp: true`` wraps the model in torch's FSDP1."""
    found = settings.native.fields.get("model.fsdp")
    options = [key for key in settings.native.fields if key.startswith("model.fsdp_")]
    if found is None or not found.value:
        settings.ignore(options, "read with model.fsdp only")
        return
    settings.take("sharding.impl", "model.fsdp", "fsdp1")
    written = settings.get("model.fsdp_sharding_strategy") or "full"
    strategy, reshard = _FSDP1.get(str(written), ("optim_grads_params", True))
    settings.take("sharding.strategy", "model.fsdp_sharding_strategy", strategy)
    why = f"fsdp_sharding_strategy {written}"
    names = ("model.fsdp_sharding_strategy", "model.fsdp")
    settings.derive("sharding.reshard_after_forward", reshard, names, why)
    ranks = settings.fields["parallel.dp"].value
    settings.derive("sharding.shard_size", ranks, names, "all data-parallel ranks")
    reduce = dtype_name(settings.get("model.fsdp_grad_reduce_dtype") or "32")
    settings.take("precision.reduce", "model.fsdp_grad_reduce_dtype", reduce)
    for key in ("comm.bucket_bytes", "comm.overlap_grad_reduce", "comm.overlap_param_gather"):
        settings.fields[key] = replace(
            settings.fields[key], effective=False, reason="FSDP1 has its own communication"
        )
