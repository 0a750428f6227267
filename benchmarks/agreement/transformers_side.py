"""transformers: ``TrainingArguments``, the plugin it asks for, and what it fills into DeepSpeed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from agreement.accelerate_side import build_plugin, plugin_fields
from agreement.base import Case

_FSDP: dict[str, dict[str, Any]] = {
    "full_shard auto_wrap": {"fsdp": "full_shard auto_wrap"},
    "shard_grad_op": {"fsdp": "shard_grad_op auto_wrap"},
    "offload word": {"fsdp": "full_shard auto_wrap offload"},
    "list of words": {"fsdp": ["full_shard", "auto_wrap"]},
    "true, empty": {"fsdp": True, "fsdp_config": {}},
    "v1 full_shard": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 1}},
    "v1 shard_grad_op": {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"version": 1}},
    "v1 hybrid": {"fsdp": "hybrid_shard auto_wrap", "fsdp_config": {"version": 1}},
    "v1 reshard key": {
        "fsdp": True,
        "fsdp_config": {"version": 1, "reshard_after_forward": "shard_grad_op"},
    },
    "v1 prefetch": {
        "fsdp": True,
        "fsdp_config": {
            "version": 1,
            "backward_prefetch": "backward_post",
            "forward_prefetch": True,
            "limit_all_gathers": False,
            "use_orig_params": False,
        },
    },
    "v2 keeps units": {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}},
    "v2 keeps units, text": {"fsdp": True, "fsdp_config": {"fsdp_reshard_after_forward": "false"}},
    "v2 word and key": {
        "fsdp": "shard_grad_op auto_wrap",
        "fsdp_config": {"reshard_after_forward": True},
    },
    "sharding_strategy is not read": {
        "fsdp": True,
        "fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"},
    },
    "offload_params is not read": {"fsdp": True, "fsdp_config": {"offload_params": True}},
    "cpu_offload": {"fsdp": True, "fsdp_config": {"cpu_offload": True}},
    "v2 ignores v1 keys": {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "backward_prefetch": "backward_pre",
            "forward_prefetch": True,
            "limit_all_gathers": True,
            "use_orig_params": True,
        },
    },
    "wrap by size": {
        "fsdp": True,
        "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000},
    },
    "layer class": {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "Block"}},
    "recompute": {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}},
    "no wrap": {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}},
    "sharded checkpoint": {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
}
_PLAIN: dict[str, dict[str, Any]] = {
    "defaults": {},
    "batch": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
    "recomputed": {"gradient_checkpointing": True, "max_grad_norm": 0.5},
    "compiled": {"torch_compile": True, "learning_rate": 1e-4},
    "empty fsdp": {"fsdp": "", "fsdp_config": {"reshard_after_forward": False}},
}
_AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}
_HIDDEN = 4096


def cases() -> Iterator[Case]:
    """Yield FSDP cases, cases without, and DeepSpeed's ``auto``."""
    versions = {"transformers": version("transformers")}
    for name, config in _FSDP.items():
        yield Case(
            name=name,
            config=config,
            fmt="hf_trainer",
            theirs=partial(_fsdp_fields, config),
            versions=versions,
        )
    for name, config in _PLAIN.items():
        yield Case(
            name=name,
            config={"per_device_train_batch_size": 8, **config},
            fmt="hf_trainer",
            theirs=partial(_plain_fields, config),
            versions=versions,
        )
    for stage in (1, 2, 3):
        config = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
        part = {**_AUTO, "zero_optimization": {**_AUTO["zero_optimization"], "stage": stage}}
        yield Case(
            name=f"DeepSpeed auto, stage {stage}",
            config=config,
            fmt="hf_trainer",
            theirs=partial(_auto_fields, config, part),
            versions=versions,
            part=part,
            hidden=_HIDDEN,
        )


def _arguments(config: Mapping[str, Any]) -> Any:
    from transformers import TrainingArguments

    copied = {k: dict(v) if isinstance(v, dict) else v for k, v in config.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TrainingArguments(output_dir="out", use_cpu=True, **copied)


def _fsdp_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    arguments = _arguments(config)
    asked = getattr(arguments, "fsdp_plugin_args", None)
    environment = {k: v for k, v in os.environ.items() if k.startswith("FSDP_")}
    plugin = build_plugin({} if asked else environment, **(asked or {}))
    for name in environment:
        del os.environ[name]
    _as_trainer(plugin, arguments)
    fields = plugin_fields(plugin)
    del fields["precision.compute"], fields["precision.reduce"]
    return fields


def _as_trainer(plugin: Any, arguments: Any) -> None:
    """Set what ``Trainer.create_accelerator_and_postprocess`` sets (before 5.10)."""
    block = arguments.fsdp_config
    for name in ("limit_all_gathers", "activation_checkpointing"):
        if name in block and not hasattr(arguments, "activation_checkpointing"):
            setattr(plugin, name, block[name])


def _plain_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    arguments = _arguments(config)
    assert not getattr(arguments, "fsdp_plugin_args", None)
    return {
        "sharding.impl": "ddp",
        "batch.micro": arguments.per_device_train_batch_size,
        "batch.accumulation": arguments.gradient_accumulation_steps,
        "optimizer.grad_clip": arguments.max_grad_norm,
        "optimizer.learning_rate": arguments.learning_rate,
        "optimizer.fused": str(getattr(arguments.optim, "value", arguments.optim)).endswith(
            "fused"
        ),
        "recompute.mode": "full" if arguments.gradient_checkpointing else "none",
        "compile.enabled": arguments.torch_compile,
    }


def _auto_fields(config: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    arguments = _arguments(config)
    copied = {k: dict(v) if isinstance(v, dict) else v for k, v in part.items()}
    filled = HfTrainerDeepSpeedConfig(copied)
    filled.trainer_config_process(arguments)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=_HIDDEN))
    filled.trainer_config_finalize(arguments, model, 100)
    zero = filled.config["zero_optimization"]
    width = 2 if filled.config["bf16"]["enabled"] else 4
    fields = {
        "batch.micro": filled.config["train_micro_batch_size_per_gpu"],
        "batch.accumulation": filled.config["gradient_accumulation_steps"],
        "optimizer.grad_clip": filled.config["gradient_clipping"],
        "comm.bucket_bytes": zero["reduce_bucket_size"] * width,
    }
    if zero["stage"] == 3:
        fields["comm.prefetch_bucket_bytes"] = zero["stage3_prefetch_bucket_size"] * width
        fields["sharding.persist_threshold"] = zero["stage3_param_persistence_threshold"]
    return fields
