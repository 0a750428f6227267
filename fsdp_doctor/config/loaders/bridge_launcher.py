"""Flags of Megatron-Bridge's performance launcher, as the fields of the recipe that they set.

Source: scripts/performance/argument_parser.py and utils/overrides.py of Megatron-Bridge 0.3 to 0.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_doctor.config.yaml_source import plain_scalar

FLAGS: dict[str, tuple[str, ...]] = {
    "global_batch_size": ("train.global_batch_size",),
    "micro_batch_size": ("train.micro_batch_size",),
    "max_steps": ("train.train_iters",),
    "seq_length": ("model.seq_length",),
    "hidden_size": ("model.hidden_size",),
    "num_layers": ("model.num_layers",),
    "tensor_model_parallel_size": ("model.tensor_model_parallel_size",),
    "pipeline_model_parallel_size": ("model.pipeline_model_parallel_size",),
    "context_parallel_size": ("model.context_parallel_size",),
    "virtual_pipeline_model_parallel_size": ("model.virtual_pipeline_model_parallel_size",),
    "expert_model_parallel_size": ("model.expert_model_parallel_size",),
    "expert_tensor_parallel_size": ("model.expert_tensor_parallel_size",),
    "cuda_graph_impl": ("model.cuda_graph_impl",),
    "cuda_graph_scope": ("model.cuda_graph_scope",),
    "pretrained_checkpoint": ("checkpoint.pretrained_checkpoint",),
    "save_dir": ("checkpoint.save",),
    "load_dir": ("checkpoint.load",),
    "save_interval": ("checkpoint.save_interval",),
    "lr": ("optimizer.lr",),
    "min_lr": ("optimizer.min_lr",),
    "num_gpus": ("launcher.num_gpus",),
}
"""Flag -> fields that take its value."""
SHORT = {
    "-ng": "num_gpus",
    "-gb": "global_batch_size",
    "-mb": "micro_batch_size",
    "-sl": "seq_length",
    "-ms": "max_steps",
    "-tp": "tensor_model_parallel_size",
    "-pp": "pipeline_model_parallel_size",
    "-cp": "context_parallel_size",
    "-vp": "virtual_pipeline_model_parallel_size",
    "-ep": "expert_model_parallel_size",
    "-et": "expert_tensor_parallel_size",
    "-c": "compute_dtype",
    "-g": "gpu",
    "-m": "model_family_name",
    "-mr": "model_recipe_name",
    "-gn": "gpus_per_node",
}
_PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp8_cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8_ds": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8_mx": "bf16_with_mxfp8_mixed",
    "fp8_sc": "bf16_with_fp8_subchannel_scaling_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
_TRUE = frozenset({"true", "1", "t", "yes", "y"})
MARKERS = (
    "scripts/performance/",
    "--use_megatron_fsdp",
    "--model_recipe_name",
    "--model_family_name",
    "--compute_dtype",
)
"""Texts of which one stands in a command of the launcher."""


def launcher_flags(words: Sequence[str]) -> dict[str, tuple[Any, int]]:
    """Return the launcher's flags, by long name, each with value and position."""
    found: dict[str, tuple[Any, int]] = {}
    for position, word in enumerate(words):
        option, equals, value = word.partition("=")
        name = SHORT.get(option) or (option[2:] if option.startswith("--") else "")
        if not name or "." in name:
            continue
        if not equals:
            following = words[position + 1] if position + 1 < len(words) else "--"
            value = (
                "true" if following.startswith("-") and not following[1:2].isdigit() else following
            )
        found[name] = (_value(value), position)
    return found


def _value(text: str) -> Any:
    folded = text.lower()
    if folded in ("true", "t", "yes", "y"):
        return True
    if folded in ("false", "f", "no", "n"):
        return False
    return None if text == "None" else plain_scalar(text)


def implied_fields(flags: dict[str, tuple[Any, int]]) -> dict[str, tuple[Any, int]]:
    """Return the recipe's fields that the flags set, each with value and position."""
    fields: dict[str, tuple[Any, int]] = {}
    for name, (value, position) in flags.items():
        for key in FLAGS.get(name, ()):
            fields[key] = (value, position)
        for key, implied in _implied(name, value, flags).items():
            fields[key] = (implied, position)
    return fields


def _implied(name: str, value: Any, flags: dict[str, tuple[Any, int]]) -> dict[str, Any]:
    if name == "compute_dtype":
        return {"mixed_precision": _PRECISIONS.get(str(value), value)}
    if name == "use_megatron_fsdp" and _is_on(value):
        return _fsdp(nccl_ub=_is_on(flags.get("nccl_ub", (False, 0))[0]))
    if name == "recompute_num_layers":
        return {
            "model.recompute_granularity": "full",
            "model.recompute_method": "block",
            "model.recompute_num_layers": value,
        }
    if name == "recompute_modules":
        modules = str(value).split(",")
        return {"model.recompute_granularity": "selective", "model.recompute_modules": modules}
    if name in ("activation_offload_layers", "cpu_offloading_num_layers"):
        return {
            "model.cpu_offloading": True,
            "model.cpu_offloading_weights": False,
            "model.cpu_offloading_num_layers": value,
        }
    if name == "tensor_model_parallel_size" and isinstance(value, int):
        return {"model.sequence_parallel": value > 1}
    return {}


def _fsdp(*, nccl_ub: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "ddp.use_megatron_fsdp": True,
        "ddp.data_parallel_sharding_strategy": "optim_grads_params",
        "ddp.keep_fp8_transpose_cache": False,
        "ddp.average_in_collective": False,
        "model.init_model_with_meta_device": True,
        "model.gradient_accumulation_fusion": True,
        "checkpoint.load": None,
    }
    if nccl_ub:
        fields |= {"ddp.nccl_ub": True, "ddp.fsdp_manual_registration": True}
    return fields


def _is_on(value: Any) -> bool:
    return value is True or str(value).lower() in _TRUE
