"""accelerate's FSDP plugin: what its arguments come to, however they reach it.

Source: accelerate/utils/dataclasses.py (FullyShardedDataParallelPlugin), utils/launch.py,
utils/fsdp_utils.py (1.15).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdp_doctor.config.resolvers.draft import Draft
from fsdp_doctor.config.resolvers.engines_native import (
    World,
    flat_params,
    fsdp1_strategy,
    fsdp2_strategy,
    offload_with_shards,
)
from fsdp_doctor.config.resolvers.words import as_bool, as_int

_ONLY_1 = ("backward_prefetch", "forward_prefetch", "sync_module_states", "use_orig_params")
NO_LIMIT = "never passed on; the plugin's true holds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """The plugin's arguments in one framework's words."""

    section: str = "fsdp_config."
    strategy: str = "FULL_SHARD"
    """FSDP1's strategy after the framework's rules."""
    strategy_natives: tuple[str, ...] = ()
    strategy_reason: str | None = None
    reshard: bool = True
    reshard_natives: tuple[str, ...] = ()
    reshard_reason: str = "as written, or the plugin's true"
    offload: bool = False
    offload_natives: tuple[str, ...] = ()
    version_natives: tuple[str, ...] = ()
    impl_reason: str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    """Plugin argument -> default, where it is not null."""
    limit_reason: str | None = NO_LIMIT
    """Why ``limit_all_gathers`` is not read; None: it is."""
    world: World = field(default_factory=World)

    def names(self, argument: str) -> tuple[str, str]:
        """Return the native keys of an argument, with and without the prefix."""
        return f"{self.section}fsdp_{argument}", f"{self.section}{argument}"


def apply(draft: Draft, plugin: Plugin, version: int) -> None:
    """Set the fields of FSDP ``version`` (1 or 2)."""
    draft.put(
        "sharding.impl",
        "fsdp2" if version == 2 else "fsdp1",
        plugin.version_natives,
        plugin.impl_reason,
    )
    if version == 2:
        _fsdp2(draft, plugin)
    else:
        _fsdp1(draft, plugin)
    offload_with_shards(draft, plugin.offload_natives, plugin.offload)
    _unit(draft, plugin)
    _recompute(draft, plugin)
    default = "SHARDED_STATE_DICT" if version == 2 else "FULL_STATE_DICT"
    draft.take(
        "ckpt.state_dict",
        plugin.names("state_dict_type"),
        _state(plugin.defaults.get("state_dict_type", default)),
        _state,
    )
    draft.take(
        "init.cpu_ram_efficient_loading",
        plugin.names("cpu_ram_efficient_loading"),
        plugin.defaults.get("cpu_ram_efficient_loading", False),
        as_bool,
    )


def _fsdp1(draft: Draft, plugin: Plugin) -> None:
    fsdp1_strategy(
        draft, plugin.strategy, plugin.strategy_natives, plugin.world, plugin.strategy_reason
    )
    prefetch = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "1": "pre", "2": "post"}
    draft.take(
        "comm.prefetch_bwd",
        plugin.names("backward_prefetch"),
        "none",
        lambda value: prefetch.get(str(value).upper(), "none"),
        reason="not written: no prefetch, unlike torch's own default",
    )
    draft.take("comm.prefetch_fwd", plugin.names("forward_prefetch"), False, as_bool)
    original = as_bool(
        draft.raw(*plugin.names("use_orig_params")), plugin.defaults.get("use_orig_params", False)
    )
    layout = "flat_with_views" if original else "flat"
    flat_params(draft, layout, plugin.names("use_orig_params"), "use_orig_params")
    draft.take(
        "init.sync_module_states",
        plugin.names("sync_module_states"),
        plugin.defaults.get("sync_module_states", False),
        as_bool,
    )
    limit = plugin.names("limit_all_gathers")
    if plugin.limit_reason is None:
        draft.take("comm.limit_all_gathers", limit, True, as_bool)
    else:
        draft.derive("comm.limit_all_gathers", True, (), plugin.limit_reason)
        draft.drop(limit, plugin.limit_reason)
    unread = "FSDP1 takes sharding_strategy; this key is read with version 2 only"
    draft.drop([k for k in plugin.reshard_natives if k not in plugin.strategy_natives], unread)


def _fsdp2(draft: Draft, plugin: Plugin) -> None:
    fsdp2_strategy(
        draft, plugin.reshard, plugin.reshard_natives, plugin.world, plugin.reshard_reason
    )
    draft.derive("comm.prefetch_bwd", "pre", (), "FSDP2 gathers the next unit during backward")
    flat_params(draft, "per_parameter", (), "FSDP2 keeps single parameters as DTensors")
    why = "FSDP2 has no such argument"
    for argument in _ONLY_1:
        draft.drop(plugin.names(argument), why)
    draft.drop(plugin.names("limit_all_gathers"), why)
    draft.drop(
        [k for k in plugin.strategy_natives if k not in plugin.reshard_natives],
        "FSDP2 takes reshard_after_forward; this key is read with version 1 only",
    )


def _unit(draft: Draft, plugin: Plugin) -> None:
    policy = plugin.names("auto_wrap_policy")
    name = str(draft.raw(*policy, default=plugin.defaults.get("auto_wrap_policy", "NO_WRAP")))
    classes = plugin.names("transformer_layer_cls_to_wrap")
    least = plugin.names("min_num_params")
    if name.upper() == "TRANSFORMER_BASED_WRAP":
        named = draft.raw(*classes)
        unit: Any = _names(named) if named else "block"
        reason = None if named else "no class named: the model's _no_split_modules"
        draft.put("sharding.unit", unit, (*policy, *classes), reason)
        draft.drop(least, "read with SIZE_BASED_WRAP only")
        return
    if name.upper() == "SIZE_BASED_WRAP":
        size = as_int(draft.raw(*least), 0)
        draft.put("sharding.unit", f"size:{size}", (*policy, *least), "units of so many elements")
    else:
        draft.put("sharding.unit", "whole", policy, "no wrap policy: one unit holds all")
        draft.drop(least, "read with SIZE_BASED_WRAP only")
    draft.drop(classes, "read with TRANSFORMER_BASED_WRAP only")


def _names(value: Any) -> list[str]:
    items = value if isinstance(value, list) else str(value).split(",")
    return [str(item).strip() for item in items]


def _recompute(draft: Draft, plugin: Plugin) -> None:
    names = plugin.names("activation_checkpointing")
    if draft.find(*names) is not None or "recompute.mode" not in draft.values:
        on = as_bool(draft.raw(*names))
        draft.put("recompute.mode", "full" if on else "none", names)
    moved = plugin.names("activation_checkpointing_offload")
    if draft.find(*moved) is not None:
        place = "cpu" if as_bool(draft.raw(*moved)) else "none"
        draft.put("offload.activations", place, moved)


def _state(value: Any) -> str:
    return str(value).rpartition(".")[2].lower().removesuffix("_state_dict")
