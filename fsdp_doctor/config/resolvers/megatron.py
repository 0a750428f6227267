"""Megatron-LM: command lines, argument dumps and recipes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_doctor.config.loaders.megatron_flags import flag_table, parse_version
from fsdp_doctor.config.resolvers.mcore import resolve_mcore
from fsdp_doctor.config.resolvers.mcore_settings import Settings
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS = ("megatron-lm",)
ASSUMED = {"megatron-lm": "0.19.0"}
_WHOLE_DUMP = 100
"""From so many arguments on, a dump is whole: what it lacks does not exist."""
VERSIONS = {"megatron-lm": ("0.12.0", "0.14.0", "0.16.0", "0.17.0", "0.18.0", "0.19.0")}


def resolve(native: NativeConfig, version: str) -> EffectiveConfig:
    """Return what Megatron-LM of a megatron-core version makes of its arguments."""
    numbers = parse_version(version)
    table = flag_table()
    printed = native.format == "megatron_args" and len(native.fields) > _WHOLE_DUMP

    def default(name: str) -> Any:
        if printed and name not in native.fields:
            return None  # this version, or fork, has no such argument
        flag = table.get(name)
        return None if flag is None else flag.default(numbers)

    settings = Settings(_with_fork_switches(native), numbers, default)
    settings.join("use_distributed_optimizer", *(["deepspeed"] if printed else []))
    resolve_mcore(settings)
    if native.format == "megatron_args":
        _deepspeed_fork(settings)
    return settings.finish(version)


def _with_fork_switches(native: NativeConfig) -> NativeConfig:
    """Megatron-LLaMA's overlapped distributed optimizer is a distributed optimizer too."""
    switch = native.fields.get("overlapped_distributed_optimizer")
    if switch is None or not switch.value or "use_distributed_optimizer" in native.fields:
        return native
    return replace(native, fields={**native.fields, "use_distributed_optimizer": switch})


def _deepspeed_fork(settings: Settings) -> None:
    """Megatron-DeepSpeed: DeepSpeed's engine takes over where ``deepspeed`` is on."""
    if settings.field("deepspeed") is None:
        return
    on = settings.on("deepspeed")
    if on:
        field = settings.fields["sharding.impl"]
        natives = ("deepspeed", *field.native)
        settings.fields["sharding.impl"] = replace(
            field, value="deepspeed", source="runtime", native=natives, written=True
        )
    name = "deepspeed_activation_checkpointing"
    value = "deepspeed" if settings.on(name) else "megatron"
    settings.take("recompute.impl", name, value)
    stage = settings.number("zero_stage")
    if not on or not stage:
        why = "stage 0: ZeRO is off" if on else "read by DeepSpeed only, which is off"
        settings.ignore(("zero_stage", "zero_reduce_scatter"), why)
