"""NeMo-RL: the policy's DTensor (FSDP2) or Megatron block; the other one is inert as a whole.

Source: nemo_rl/models/policy (dtensor_policy_worker_v2.py, megatron/setup.py) of NeMo-RL 0.4, 0.5.
"""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.resolvers.fsdp2_fields import Fsdp2Keys, fsdp2_fields
from fsdp_doctor.config.resolvers.mcore import resolve_mcore
from fsdp_doctor.config.resolvers.mcore_settings import Settings, dtype_name
from fsdp_doctor.config.resolvers.nemo import default_of
from fsdp_doctor.config.resolvers.nemo_names import paths_in
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS = ("nemo-rl",)
ASSUMED = {"nemo-rl": "0.5.0"}
_MEGATRON = "policy.megatron_cfg."
_DTENSOR = "policy.dtensor_cfg."
_CORE = (0, 17)
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def resolve(native: NativeConfig, version: str) -> EffectiveConfig:
    """Return what the enabled block comes to."""
    settings = _settings(native)
    if _on(native, f"{_MEGATRON}enabled"):
        _megatron(settings)
        settings.ignore_section(_DTENSOR, f"{_MEGATRON}enabled is on, {_DTENSOR}enabled is not")
    else:
        _dtensor(settings)
        settings.ignore_section(_MEGATRON, f"{_MEGATRON}enabled is off")
    return settings.finish(version)


def _on(native: NativeConfig, key: str) -> bool:
    found = native.fields.get(key)
    return found is not None and found.value is True


def _settings(native: NativeConfig) -> Settings:
    megatron = _on(native, f"{_MEGATRON}enabled")
    block = _MEGATRON if megatron else _DTENSOR
    paths = paths_in(native.fields, block)
    paths["global_batch_size"] = "policy.train_global_batch_size"
    paths["micro_batch_size"] = "policy.train_micro_batch_size"
    values: dict[str, Any] = {}
    precision = native.fields.get("policy.precision")
    if precision is not None:
        dtype = dtype_name(precision.value)
        paths |= {"bf16": "policy.precision", "fp16": "policy.precision"}
        values |= {"bf16": dtype == "bfloat16", "fp16": dtype == "float16"}
    if megatron:
        paths["recompute_granularity"] = f"{_MEGATRON}recompute_granularity"
        _recomputation(native, values)
    settings = Settings(native, _CORE, default_of, paths, values)
    _world(settings)
    return settings


def _recomputation(native: NativeConfig, values: dict[str, Any]) -> None:
    """Source: setup.py: nothing of recomputation is read unless activation_checkpointing is on."""
    if _on(native, f"{_MEGATRON}activation_checkpointing"):
        found = native.fields.get(f"{_MEGATRON}recompute_granularity")
        mode = "full" if found is None or found.value is None else found.value
        values["recompute_granularity"] = mode
        if mode == "full":
            values |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    else:
        values |= dict.fromkeys(_RECOMPUTE)


def _world(settings: Settings) -> None:
    gpus = settings.native.fields.get("cluster.gpus_per_node")
    nodes = settings.native.fields.get("cluster.num_nodes")
    if gpus is None or not isinstance(gpus.value, int):
        return
    count = nodes.value if nodes is not None and isinstance(nodes.value, int) else 1
    path = "cluster.gpus_per_node"
    settings.redirect("world_size", path, gpus.value * count, "GPUs per node x nodes")
    settings.join("world_size", "cluster.num_nodes")


def _megatron(settings: Settings) -> None:
    checkpointing = f"{_MEGATRON}activation_checkpointing"
    settings.join("recompute_granularity", checkpointing)
    resolve_mcore(settings)
    if not _on(settings.native, checkpointing):
        settings.ignore(
            (f"{_MEGATRON}recompute_granularity", f"{_MEGATRON}recompute_modules"),
            "read with activation_checkpointing only",
        )


def _dtensor(settings: Settings) -> None:
    keys = Fsdp2Keys(
        switch=f"{_DTENSOR}enabled",
        tensor=f"{_DTENSOR}tensor_parallel_size",
        context=f"{_DTENSOR}context_parallel_size",
        sequence=f"{_DTENSOR}sequence_parallel",
        replicate=f"{_DTENSOR}dp_replicate_size",
        offload=f"{_DTENSOR}cpu_offload",
        recompute=f"{_DTENSOR}activation_checkpointing",
        micro="policy.train_micro_batch_size",
        whole="policy.train_global_batch_size",
        length="policy.max_total_sequence_length",
        optimizer="policy.optimizer.name",
        clip="policy.max_grad_norm",
        precision="policy.precision",
    )
    fsdp2_fields(settings, keys, reduce="float32", storage="float32")
