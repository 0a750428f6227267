"""accelerate: the launcher's environment, then its FSDP and DeepSpeed plugins."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from agreement.base import FSDP1_STRATEGIES, SHARDED, Case, dtype_name

_BASE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
}
_FSDP: dict[str, dict[str, Any]] = {
    "empty block": {},
    "v1, nothing else": {"fsdp_version": 1},
    "v1 strategy by name": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"},
    "v1 strategy by number": {"fsdp_sharding_strategy": 2},
    "v1 hybrid": {"fsdp_sharding_strategy": "HYBRID_SHARD"},
    "v1 no shard": {"fsdp_sharding_strategy": "NO_SHARD"},
    "v1 reshard key has no say": {
        "fsdp_version": 1,
        "fsdp_reshard_after_forward": "SHARD_GRAD_OP",
    },
    "v1 both keys": {
        "fsdp_reshard_after_forward": "FULL_SHARD",
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    },
    "v1 without prefix": {"sharding_strategy": "SHARD_GRAD_OP", "auto_wrap_policy": "NO_WRAP"},
    "v1 offload": {"fsdp_offload_params": True},
    "v1 backward pre": {"fsdp_backward_prefetch": "BACKWARD_PRE"},
    "v1 backward post": {"fsdp_backward_prefetch": "BACKWARD_POST"},
    "v1 backward off": {"fsdp_backward_prefetch": "NO_PREFETCH"},
    "v1 forward prefetch": {"fsdp_forward_prefetch": True},
    "v1 flat parameters": {"fsdp_use_orig_params": False},
    "v1 limit is never passed on": {"fsdp_limit_all_gathers": False},
    "v1 wrap by layer": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "BlockA,BlockB",
    },
    "v1 wrap by size": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000},
    "v1 recompute": {"fsdp_activation_checkpointing": True},
    "v1 sharded checkpoint": {"fsdp_state_dict_type": "SHARDED_STATE_DICT"},
    "v2": {"fsdp_version": 2},
    "v2 keeps units": {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
    "v2 strategy has no say": {"fsdp_version": 2, "fsdp_sharding_strategy": "SHARD_GRAD_OP"},
    "v2 prefetch has no say": {"fsdp_version": 2, "fsdp_backward_prefetch": "BACKWARD_POST"},
    "v2 offload, recompute": {
        "fsdp_version": 2,
        "fsdp_offload_params": True,
        "fsdp_activation_checkpointing": True,
    },
    "v2 wrap by layer": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    },
}


def cases() -> Iterator[Case]:
    """Yield the FSDP blocks above under bf16, and some under other precisions."""
    for name, block in _FSDP.items():
        config = {**_BASE, "fsdp_config": block}
        yield Case(
            name=name,
            config=config,
            fmt="accelerate",
            theirs=partial(_plugin_fields, config),
            versions={"accelerate": version("accelerate")},
        )
    for word in ("no", "fp16"):
        for number in (1, 2):
            config = {**_BASE, "mixed_precision": word, "fsdp_config": {"fsdp_version": number}}
            yield Case(
                name=f"v{number} mixed_precision {word}",
                config=config,
                fmt="accelerate",
                theirs=partial(_plugin_fields, config),
                versions={"accelerate": version("accelerate")},
            )


def _plugin_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    plugin = launched_plugin(config)
    word = config["mixed_precision"]
    if word != "no":
        plugin.set_mixed_precision(word)
    return plugin_fields(plugin)


def launched_plugin(config: Mapping[str, Any]) -> Any:
    """Return the plugin that a process started by ``accelerate launch`` builds."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        arguments = launch_command_parser().parse_args(["--config_file", str(path), "x.py"])
        arguments, _, _ = _validate_launch_command(arguments)
        environment = prepare_multi_gpu_env(arguments)
    kept = {k: v for k, v in environment.items() if k.startswith(("FSDP_", "ACCELERATE"))}
    return build_plugin(kept)


def build_plugin(environment: Mapping[str, str], **arguments: Any) -> Any:
    """Return a plugin built under ``environment``, with a device that it can name."""
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin, dataclasses

    before = dict(os.environ)
    dataclasses.is_cuda_available = lambda: True
    torch.cuda.current_device = lambda: 0
    for name in list(os.environ):
        if name.startswith(("FSDP_", "ACCELERATE")):
            del os.environ[name]
    os.environ.update(environment)
    try:
        return FullyShardedDataParallelPlugin(**arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)


def plugin_fields(plugin: Any) -> dict[str, Any]:
    """Return a plugin's arguments by our keys."""
    second = plugin.fsdp_version == 2
    fields: dict[str, Any] = {
        "sharding.impl": "fsdp2" if second else "fsdp1",
        "offload.params": "cpu" if _offloads(plugin.cpu_offload) else "none",
        "recompute.mode": "full" if plugin.activation_checkpointing else "none",
        "ckpt.state_dict": plugin.state_dict_type.name.lower().removesuffix("_state_dict"),
        "sharding.unit": _unit(plugin),
    }
    if second:
        fields["sharding.strategy"] = SHARDED
        fields["sharding.reshard_after_forward"] = plugin.reshard_after_forward
        fields["comm.prefetch_fwd"] = plugin.forward_prefetch
        fields["sharding.flat_params"] = "per_parameter"
    else:
        strategy, reshard = FSDP1_STRATEGIES[plugin.sharding_strategy.name]
        fields["sharding.strategy"] = strategy
        fields["sharding.reshard_after_forward"] = reshard
        fields["comm.prefetch_fwd"] = plugin.forward_prefetch
        fields["comm.limit_all_gathers"] = plugin.limit_all_gathers
        fields["comm.prefetch_bwd"] = _prefetch(plugin.backward_prefetch)
        layout = "flat_with_views" if plugin.use_orig_params else "flat"
        fields["sharding.flat_params"] = layout
    policy = plugin.mixed_precision_policy
    fields["precision.compute"] = dtype_name(getattr(policy, "param_dtype", None))
    fields["precision.reduce"] = dtype_name(getattr(policy, "reduce_dtype", None))
    return fields


def _offloads(offload: Any) -> bool:
    if isinstance(offload, bool) or offload is None:
        return bool(offload)
    if hasattr(offload, "offload_params"):
        return bool(offload.offload_params)
    return type(offload).__name__ == "CPUOffloadPolicy"


def _prefetch(value: Any) -> str:
    return "none" if value is None else {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post"}[value.name]


def _unit(plugin: Any) -> Any:
    policy = plugin.auto_wrap_policy
    if policy is None:
        return "whole"
    if "size_based" in policy.__name__:
        return f"size:{plugin.min_num_params}"
    return plugin.transformer_cls_names_to_wrap or "block"
