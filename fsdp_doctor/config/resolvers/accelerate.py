"""``accelerate launch``: what its config becomes, by way of environment variables, at run time.

Source: accelerate/commands/launch.py, utils/launch.py, utils/dataclasses.py (1.15).
"""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.resolvers import deepspeed
from fsdp_doctor.config.resolvers.draft import HIDDEN, Draft
from fsdp_doctor.config.resolvers.engines_native import World, ddp_strategy, mixed
from fsdp_doctor.config.resolvers.fsdp_plugin import Plugin
from fsdp_doctor.config.resolvers.fsdp_plugin import apply as apply_plugin
from fsdp_doctor.config.resolvers.words import as_bool, as_int, dtype, sharding_strategy
from fsdp_doctor.config.versions import at_least, version_for
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("accelerate",)
ASSUMED: dict[str, str] = {"accelerate": "1.15.0"}
VERSIONS: dict[str, tuple[str, ...]] = {"accelerate": ("1.5.0", "1.15.0")}
_SECTIONS = ("fsdp_config.", "deepspeed_config.", "megatron_lm_config.", "parallelism_config.")
_DEEPSPEED_KEYS = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "zero3_save_16bit_model",
}
_ZERO = ("deepspeed_config.zero_stage", "deepspeed:zero_optimization.stage")
PART = "deepspeed:"
"""Before the keys of a DeepSpeed JSON given beside another config."""


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of an accelerate YAML."""
    draft = Draft(native, version)
    add_part(draft)
    kind = str(draft.raw("distributed_type", default="NO")).upper()
    size = as_int(draft.raw("num_processes"))
    draft.take("world.size", "num_processes", None, as_int)
    draft.take("world.nodes", "num_machines", 1, as_int)
    world = World(size=size, nodes=as_int(draft.raw("num_machines")), natives=("num_processes",))
    if kind == "FSDP":
        _fsdp(draft, version, world)
        _mixed(draft, sharded=True)
    elif kind == "DEEPSPEED":
        _deepspeed(draft)
    elif kind == "MEGATRON_LM":
        draft.put("sharding.impl", "megatron_ddp", ("distributed_type",))
        _mixed(draft, sharded=False)
    else:
        impl = "ddp" if kind.startswith("MULTI") else "none"
        draft.put("sharding.impl", impl, ("distributed_type",), f"distributed_type: {kind}")
        ddp_strategy(draft, ("distributed_type",), world)
        _mixed(draft, sharded=False)
    for section in _SECTIONS:
        draft.drop_section(section, f"the block is not read with distributed_type: {kind}")
    return draft.finish("accelerate's launcher does not know this key: dropped")


def add_part(draft: Draft) -> None:
    """Add the keys of a DeepSpeed JSON given beside the config, under a prefix of their own."""
    for part in draft.native.parts:
        if part.framework == "deepspeed":
            draft.fields |= {f"{PART}{key}": field for key, field in part.fields.items()}


def deepspeed_prefix(draft: Draft, inline: str) -> str:
    """Return where DeepSpeed's keys stand: in a file beside, or inline under ``inline``."""
    return PART if draft.section(PART) else inline


def deepspeed_version(draft: Draft) -> str | None:
    """Return DeepSpeed's version, or the one whose rules are taken to hold."""
    known = version_for("deepspeed", {}, draft.native.packages)
    return known or deepspeed.ASSUMED["deepspeed"]


def _fsdp(draft: Draft, version: str | None, world: World) -> None:
    number = as_int(draft.raw(*_names("version")), 1) or 1
    if not at_least(version, "1.6"):
        number = 1
        draft.drop(_names("version"), f"accelerate {version} has FSDP1 only")
    written = draft.raw(*_names("sharding_strategy"), default="FULL_SHARD")
    natives: tuple[str, ...] = _names("sharding_strategy")
    strategy, reason = sharding_strategy(written) or "FULL_SHARD", None
    if number == 2:
        _parallelism(draft, world)
    else:
        strategy, natives, reason = _strategy_one(draft, version, strategy)
    plugin = Plugin(
        strategy=strategy,
        strategy_natives=natives,
        strategy_reason=reason,
        reshard=as_bool(draft.raw(*_names("reshard_after_forward")), True),
        reshard_natives=_names("reshard_after_forward"),
        offload=as_bool(draft.raw(*_names("offload_params"))),
        offload_natives=_names("offload_params"),
        version_natives=(*_names("version"), "distributed_type"),
        impl_reason=f"FSDP version {number}",
        defaults={
            "use_orig_params": True,
            "sync_module_states": True,
            "cpu_ram_efficient_loading": True,
        },
        world=world,
    )
    apply_plugin(draft, plugin, number)


def _strategy_one(
    draft: Draft, version: str | None, strategy: str
) -> tuple[str, tuple[str, ...], str | None]:
    """Return FSDP1's strategy, its keys and why; ``fsdp_reshard_after_forward`` has no say.

    Until 1.6 there was no such key: the plugin took ``fsdp_sharding_strategy`` alone.
    """
    reshard = draft.raw(*_names("reshard_after_forward"))
    if reshard is None:
        return strategy, _names("sharding_strategy"), None
    key = draft.find(*_names("reshard_after_forward")) or ""
    why = f"FSDP1 runs as {strategy}: fsdp_sharding_strategy, or its default, wins"
    if not at_least(version, "1.6"):
        why = "accelerate before 1.6 does not know this key"
    draft.drop((key,), why)
    return strategy, _names("sharding_strategy"), "fsdp_sharding_strategy, or its default"


def _names(argument: str) -> tuple[str, str]:
    return f"fsdp_config.fsdp_{argument}", f"fsdp_config.{argument}"


def _parallelism(draft: Draft, world: World) -> None:
    sizes: dict[str, int] = {}
    prefix = "parallelism_config.parallelism_config_"
    if not draft.section("parallelism_config."):
        return
    for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp"):
        keys = (f"{prefix}{name}_size", f"parallelism_config.{name}_size")
        sizes[name] = as_int(draft.raw(*keys), 1) or 1
        if name == "dp_replicate":
            draft.put("sharding.replicate_size", sizes[name], keys)
        elif name != "dp_shard":
            draft.put(f"parallel.{name}", sizes[name], keys)
    natives = (f"{prefix}dp_shard_size", f"{prefix}cp_size", *world.natives)
    shard = sizes["dp_shard"] * sizes["cp"]
    draft.put("sharding.shard_size", shard, natives, "dp_shard_size x cp_size")


def _mixed(draft: Draft, *, sharded: bool) -> None:
    written = draft.raw("mixed_precision", default="no")
    name = None if str(written).lower() in ("no", "none", "false") else str(written).lower()
    computes = "bfloat16" if name == "fp8" else dtype(name)
    if sharded and computes is not None:
        mixed(draft, computes, ("mixed_precision",))
    elif sharded:
        why = "no mixed precision: as the model was loaded"
        draft.put("precision.compute", None, ("mixed_precision",), why)
    else:
        draft.put("precision.autocast", computes or "none", ("mixed_precision",))
    if name == "fp8":
        draft.put("precision.fp8", True, ("mixed_precision",), "fp8 on top of bf16")
    else:
        draft.drop_section("fp8_config.", "read with mixed_precision: fp8 only")


def _deepspeed(draft: Draft) -> None:
    in_file = draft.find("deepspeed_config.deepspeed_config_file") is not None
    inline = {key: f"deepspeed_config.{name}" for key, name in _DEEPSPEED_KEYS.items()}
    written = str(draft.raw("mixed_precision", default="no")).lower()
    auto: dict[str, Any] = {"bf16.enabled": written == "bf16", "fp16.enabled": written == "fp16"}
    defaults: dict[str, Any] = {} if in_file else {"zero_optimization.stage": 2}
    if not in_file:
        defaults |= {"bf16.enabled": written == "bf16", "fp16.enabled": written == "fp16"}
    if in_file and not draft.section(PART):
        names = ("distributed_type", "deepspeed_config.deepspeed_config_file", "mixed_precision")
        compute = dtype(written) or "float32"
        deepspeed.without_file(draft, names, compute, "distributed_type: DEEPSPEED")
        return
    launcher = deepspeed.Launcher(
        prefix=PART,
        inline=inline,
        defaults=defaults,
        auto=auto,
        hidden=as_int(draft.raw(HIDDEN)),
        reason="distributed_type: DEEPSPEED",
    )
    deepspeed.apply(draft, deepspeed_version(draft), launcher)
    names = ("mixed_precision", f"{PART}bf16.enabled", f"{PART}fp16.enabled")
    draft.put("precision.compute", draft.values["precision.compute"].value, names)
    draft.put("sharding.impl", "deepspeed", ("distributed_type", *_ZERO), launcher.reason)
