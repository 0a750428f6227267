"""Lightning: strategy and precision objects as the Trainer builds them from a config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any

from agreement.base import FSDP1_STRATEGIES, Case, dtype_name

_PATH = "lightning.pytorch.strategies"
_FSDP: dict[str, dict[str, Any]] = {
    "FSDPStrategy": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": [1, 2]},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "cpu_offload": {"cpu_offload": True},
    "flat parameters": {"use_orig_params": False},
    "forward prefetch": {"forward_prefetch": True},
    "no limit": {"limit_all_gathers": False},
    "sharded checkpoint": {"state_dict_type": "sharded"},
}
_WORDS = ("fsdp", "fsdp_cpu_offload", "ddp", "ddp_find_unused_parameters_true")
_DDP: dict[str, dict[str, Any]] = {
    "DDPStrategy": {},
    "bucket": {"bucket_cap_mb": 50},
    "bucket view": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
}
_DEEPSPEED: dict[str, dict[str, Any]] = {
    "DeepSpeedStrategy": {},
    "stage 3": {"stage": 3},
    "stage 1, own bucket": {"stage": 1, "reduce_bucket_size": 1000},
    "no overlap": {"overlap_comm": False},
}
_DEEPSPEED_WORDS = (
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3_offload",
)
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


def _by_class(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    strategy = {"class_path": f"{_PATH}.{name}", "init_args": dict(arguments)}
    return {"trainer": {"devices": 2, "strategy": strategy}}


def cases() -> Iterator[Case]:
    """Yield strategies by class and by word, and FSDP's precisions."""
    for name, arguments in _FSDP.items():
        theirs = partial(_fsdp_fields, arguments)
        yield _case(name, _by_class("FSDPStrategy", arguments), theirs)
    for name, arguments in _DDP.items():
        yield _case(name, _by_class("DDPStrategy", arguments), partial(_ddp_fields, arguments))
    for word in _WORDS:
        config = {"trainer": {"devices": 2, "strategy": word}}
        yield _case(f"strategy: {word}", config, partial(_word_fields, word))
    for name, arguments in _DEEPSPEED.items():
        theirs = partial(_deepspeed_fields, arguments)
        yield _case(name, _by_class("DeepSpeedStrategy", arguments), theirs)
    for word in _DEEPSPEED_WORDS:
        config = {"trainer": {"devices": 2, "strategy": word}}
        yield _case(f"strategy: {word}", config, partial(_deepspeed_word, word))
    for word in _PRECISIONS:
        config = _by_class("FSDPStrategy", {})
        config["trainer"]["precision"] = word
        yield _case(f"precision: {word}", config, partial(_precision_fields, word))


def _case(name: str, config: Mapping[str, Any], theirs: Any) -> Case:
    known = {"lightning": version("lightning")}
    return Case(name=name, config=config, fmt="lightning", theirs=theirs, versions=known)


def _fsdp_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    from lightning.pytorch.strategies import FSDPStrategy

    mesh = arguments.get("device_mesh")
    given = {**arguments, "device_mesh": tuple(mesh)} if mesh else dict(arguments)
    return _of_fsdp(FSDPStrategy(**given))


def _of_fsdp(strategy: Any) -> dict[str, Any]:
    what, reshard = FSDP1_STRATEGIES[strategy.sharding_strategy.name]
    original = strategy.kwargs.get("use_orig_params", False)
    return {
        "sharding.impl": "fsdp1",
        "sharding.strategy": what,
        "sharding.reshard_after_forward": reshard,
        "offload.params": "cpu" if strategy.cpu_offload.offload_params else "none",
        "comm.prefetch_fwd": strategy.kwargs.get("forward_prefetch", False),
        "comm.limit_all_gathers": strategy.kwargs.get("limit_all_gathers", True),
        "sharding.flat_params": "flat_with_views" if original else "flat",
        "ckpt.state_dict": vars(strategy)["_state_dict_type"],
    }


def _ddp_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    from lightning.pytorch.strategies import DDPStrategy

    return _of_ddp(DDPStrategy(**arguments))


def _of_ddp(strategy: Any) -> dict[str, Any]:
    given = vars(strategy)["_ddp_kwargs"]
    cap = given.get("bucket_cap_mb", 25)
    return {
        "sharding.impl": "ddp",
        "sharding.strategy": "none",
        "comm.bucket_bytes": int(cap * (1 << 20)),
        "comm.bucket_view": given.get("gradient_as_bucket_view", False),
        "ddp.static_graph": given.get("static_graph", False),
        "ddp.find_unused_parameters": given.get("find_unused_parameters", False),
    }


def _registered(word: str) -> Any:
    from lightning.pytorch.strategies import StrategyRegistry

    return StrategyRegistry.get(word)


def _word_fields(word: str) -> dict[str, Any]:
    strategy = _registered(word)
    return _of_fsdp(strategy) if word.startswith("fsdp") else _of_ddp(strategy)


def _deepspeed_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    return _of_deepspeed(DeepSpeedStrategy(**arguments))


def _deepspeed_word(word: str) -> dict[str, Any]:
    return _of_deepspeed(_registered(word))


def _of_deepspeed(strategy: Any) -> dict[str, Any]:
    """Lightning adds precision later: here it is float32, so elements have 4 bytes."""
    zero = strategy.config["zero_optimization"]
    fields: dict[str, Any] = {
        "sharding.impl": "deepspeed",
        "sharding.strategy": ("none", "optim", "optim_grads", "optim_grads_params")[zero["stage"]],
        "comm.overlap_grad_reduce": zero["overlap_comm"],
        "comm.contiguous_gradients": zero["contiguous_gradients"],
        "comm.bucket_bytes": zero["reduce_bucket_size"] * 4,
        "offload.optimizer": zero.get("offload_optimizer", {}).get("device", "none"),
    }
    if zero["stage"] == 3:
        fields["offload.params"] = zero.get("offload_param", {}).get("device", "none")
        fields["optimizer.sub_group_size"] = zero["sub_group_size"]
    else:
        fields["comm.allgather_bucket_bytes"] = zero["allgather_bucket_size"] * 4
    if "offload_optimizer" in zero:
        fields["offload.pin_memory"] = zero["offload_optimizer"]["pin_memory"]
    return fields


def _precision_fields(word: str) -> dict[str, Any]:
    from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision

    plugin = FSDPPrecision(word)
    policy = plugin.mixed_precision_config
    return {
        "precision.compute": dtype_name(policy.param_dtype),
        "precision.reduce": dtype_name(policy.reduce_dtype),
        "precision.buffer": dtype_name(policy.buffer_dtype),
        "precision.param_storage": dtype_name(vars(plugin)["_desired_input_dtype"])
        if word.endswith("true")
        else "float32",
    }
