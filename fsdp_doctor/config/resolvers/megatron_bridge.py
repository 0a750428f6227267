"""Megatron-Bridge: its sections, and the objects that overwrite them before training.

Order, in config.py of Bridge 0.1 to 0.6: ``mixed_precision.setup`` overwrites model, optimizer and
ddp, then ``comm_overlap.setup`` overwrites ddp, then validation adjusts what Megatron-FSDP needs.
"""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.loaders.megatron_fields import section_table
from fsdp_doctor.config.loaders.megatron_flags import Version, parse_version
from fsdp_doctor.config.resolvers.bridge_layers import comm_overlap_layer, mixed_precision_layer
from fsdp_doctor.config.resolvers.bridge_names import PATHS, RECIPE_DEFAULTS
from fsdp_doctor.config.resolvers.mcore import resolve_mcore
from fsdp_doctor.config.resolvers.mcore_rules import uses_megatron_fsdp
from fsdp_doctor.config.resolvers.mcore_settings import Settings
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS = ("megatron-bridge",)
ASSUMED = {"megatron-bridge": "0.6.0"}
VERSIONS = {"megatron-bridge": ("0.1.0", "0.2.0", "0.3.1", "0.4.0", "0.5.0", "0.6.0")}
_CORES: tuple[tuple[Version, Version], ...] = (
    ((0, 6), (0, 19)),
    ((0, 5), (0, 18)),
    ((0, 4), (0, 17)),
    ((0, 3), (0, 16)),
    ((0, 2), (0, 15)),
    ((0, 1), (0, 14)),
)
"""Bridge version -> version of Megatron-Core that it brings."""


def resolve(native: NativeConfig, version: str) -> EffectiveConfig:
    """Return what Bridge of a version makes of a configuration, or of overrides on a recipe.

    What overrides leave open is as Bridge's base recipe has it.
    """
    bridge = parse_version(version)
    core = native.packages.get("megatron-core")
    core_version = parse_version(core) if core else core_of(bridge)
    full = any(field.source == "dump" for field in native.fields.values())

    def default(name: str) -> Any:
        if not full and name in RECIPE_DEFAULTS:
            return RECIPE_DEFAULTS[name]
        section, _, field = PATHS.get(name, "").partition(".")
        if section in ("ddp", "optimizer", "model"):
            flag = section_table(section).get(field)
            return None if flag is None else flag.default(core_version)
        return _DEFAULTS.get(name)

    settings = Settings(native, core_version, default, PATHS, _read_values(native))
    _shared_switches(settings)
    mixed_precision_layer(settings, full=full)
    comm_overlap_layer(settings)
    if uses_megatron_fsdp(settings):
        _fsdp_rules(settings, bridge)
    resolve_mcore(settings)
    return settings.finish(version)


def core_of(bridge: Version) -> Version:
    """Return the version of Megatron-Core that a version of Bridge comes with."""
    return next((core for since, core in _CORES if bridge[:2] >= since), (0, 14))


_DEFAULTS: dict[str, Any] = {
    "ckpt_format": "torch_dist",
    "ckpt_fully_parallel_save": True,
    "async_save": False,
    "use_megatron_fsdp": False,
    "use_torch_fsdp2": False,
    "torch_fsdp2_reshard_after_forward": True,
    "untie_embeddings_and_output_weights": False,
    "swiglu": False,
    "empty_unused_memory_level": 0,
    "manual_gc": False,
    "transformer_impl": "transformer_engine",
    "use_layer_wise_param_layout": True,
    "init_model_with_meta_device": False,
}


def _read_values(native: NativeConfig) -> dict[str, Any]:
    """Return settings that Bridge states the other way round than Megatron-LM."""
    shared = native.fields.get("model.share_embeddings_and_output_weights")
    return {} if shared is None else {"untie_embeddings_and_output_weights": not shared.value}


def _shared_switches(settings: Settings) -> None:
    """Fields that two sections have and that validation keeps in step."""
    for name, other in (
        ("use_megatron_fsdp", "dist.use_megatron_fsdp"),
        ("use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
        ("overlap_param_gather", "optimizer.overlap_param_gather"),
    ):
        found = settings.native.fields.get(other)
        if found is None:
            continue
        own = settings.path(name)
        if found.value is True and not settings.on(name):
            settings.redirect(
                name, other, value=True, reason=f"{other} is on: both are kept in step"
            )
            settings.join(name, own)
        elif settings.field(name) is None and name == "use_megatron_fsdp":
            settings.redirect(name, other, value=bool(found.value), reason="the same switch")
        else:
            settings.join(name, other)
    for path in ("dataset.sequence_length", "dataset.seq_length"):
        length = settings.native.fields.get(path)
        if length is not None and isinstance(length.value, int):
            settings.redirect("seq_length", path, length.value, "the length of the data's samples")


def _fsdp_rules(settings: Settings, bridge: Version) -> None:
    """Source: ConfigContainer.validate; average_in_collective has an exception since 0.4."""
    why = "Bridge sets this under Megatron-FSDP"
    fsdp = ("use_megatron_fsdp",)
    settings.force("use_distributed_optimizer", value=True, reason=why, because=fsdp)
    unregistered = settings.on("disable_symmetric_registration") and bridge >= (0, 4)
    if not unregistered:
        settings.force("ddp_average_in_collective", value=False, reason=why, because=fsdp)
    if (0, 2) <= bridge[:2] <= (0, 3):
        settings.force("gradient_accumulation_fusion", value=False, reason=why, because=fsdp)
    if settings.on("nccl_ub") and bridge >= (0, 5):
        settings.force("fsdp_manual_registration", value=True, reason=why, because=("nccl_ub",))
