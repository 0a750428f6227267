"""A Megatron spec as Megatron's own resolver and rules read it: native fields under its keys."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdp_doctor.config.loaders.megatron_fields import section_table
from fsdp_doctor.config.loaders.megatron_flags import parse_version
from fsdp_doctor.config.resolvers.bridge_names import PATHS
from fsdp_doctor.config.resolvers.mcore import resolve_mcore
from fsdp_doctor.config.resolvers.mcore_rules import uses_megatron_fsdp
from fsdp_doctor.config.resolvers.mcore_settings import Settings
from fsdp_doctor.config.schema import leaf_values
from fsdp_doctor.model.config import ConfigValue, NativeConfig, NativeField
from fsdp_doctor.model.spec import ProfileSpec

PREFIX = "config.megatron."
ASSUMED_CORE = "0.19.2"
"""Version whose rules hold where megatron-core is not installed."""
_WORKLOAD = {
    "num_layers": "workload.model.layers",
    "hidden_size": "workload.model.hidden",
    "num_attention_heads": "workload.model.heads",
    "num_query_groups": "workload.model.kv_heads",
    "ffn_hidden_size": "workload.model.ffn",
    "vocab_size": "workload.model.vocab",
    "untie_embeddings_and_output_weights": "workload.model.tied_embeddings",
    "micro_batch_size": "workload.micro_batch",
    "seq_length": "workload.sequence_length",
    "world_size": "world_size",
}
_FIXED = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "position_embedding_type": "rope",
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "empty_unused_memory_level": 0,
    "ckpt_format": "torch_dist",
    "use_torch_fsdp2": False,
    "torch_fsdp2_reshard_after_forward": True,
    "use_layer_wise_param_layout": True,
}
"""What this tool's Megatron job always has (see ``training.megatron_model``), and defaults."""
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def installed_core() -> str | None:
    """Return the installed version of megatron-core, without importing it."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def resolve_megatron(
    spec: ProfileSpec, written: Mapping[str, str], version: str | None = None
) -> dict[str, ConfigValue]:
    """Return the canonical fields that Megatron's rules make of a spec's sections.

    ``version`` is megatron-core's; None: the installed one.
    """
    core = parse_version(version or installed_core() or ASSUMED_CORE)
    native = _native_fields(spec, written)
    settings = Settings(
        NativeConfig(format="spec", framework="megatron-core", fields=native),
        core,
        lambda name: _default(name, core),
        _paths(),
        _values(spec),
    )
    _same_switch(settings, spec)
    if uses_megatron_fsdp(settings):
        why = "Megatron-FSDP brings its own sharded optimizer"
        settings.force("use_distributed_optimizer", True, why, ("use_megatron_fsdp",))
    resolve_mcore(settings)
    return dict(settings.finish(version).fields)


def _paths() -> dict[str, str]:
    paths = {name: f"{PREFIX}{path}" for name, path in PATHS.items()}
    return {**paths, **_WORKLOAD, "global_batch_size": "config.gradient_accumulation.steps"}


def _native_fields(spec: ProfileSpec, written: Mapping[str, str]) -> dict[str, NativeField]:
    """Return the fields that Megatron reads; what nobody wrote counts as printed by it."""
    fields: dict[str, NativeField] = {}
    wanted = set(_WORKLOAD.values())
    for path, value in leaf_values(spec):
        if path in wanted or path.startswith(PREFIX):
            source: Any = written.get(path, "dump")
            fields[path] = NativeField(value=value, source=source)
    return fields


def _values(spec: ProfileSpec) -> dict[str, Any]:
    """Return settings whose value in the spec means something else than in Megatron."""
    model, steps = spec.workload.model, spec.config.gradient_accumulation.steps
    return {
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "ffn_hidden_size": model.ffn or 4 * model.hidden,
        "global_batch_size": spec.workload.micro_batch * steps * spec.world_size,
        "gradient_accumulation_fusion": False,
        "transformer_impl": "local",
    }


def _same_switch(settings: Settings, spec: ProfileSpec) -> None:
    """``dist.use_megatron_fsdp`` and ``ddp.use_megatron_fsdp`` are one switch."""
    other = f"{PREFIX}dist.use_megatron_fsdp"
    if spec.config.megatron.dist.use_megatron_fsdp:
        settings.redirect("use_megatron_fsdp", other, True, "the same switch as the one in ddp")
    settings.join("use_megatron_fsdp", other, f"{PREFIX}ddp.use_megatron_fsdp")


def _default(name: str, core: tuple[int, ...]) -> Any:
    if name in _FIXED:
        return _FIXED[name]
    section, _, field = PATHS.get(name, "").partition(".")
    if section in ("ddp", "optimizer", "model"):
        flag = section_table(section).get(field)
        return None if flag is None else flag.default(core)
    return None


def rules_view(
    spec: ProfileSpec,
    *,
    versions: Mapping[str, str],
    places: Mapping[str, NativeField] | None = None,
) -> NativeConfig:
    """Return a spec as a config of Megatron-Bridge, whose rules then apply to it.

    ``versions``: of megatron-core, torch, ... ``places``: the spec's keys as written, with their
    file and line. A checkpoint that the spec asks for has its format.
    """
    known = places or {}
    flat = dict(leaf_values(spec))
    fields = {
        name: _at(known.get(path), _megatron_value(path, flat[path]))
        for name, path in rule_names(spec).items()
    }
    fields["model.transformer_impl"] = NativeField(value="local")
    megatron = spec.config.megatron
    switch = megatron.dist.use_megatron_fsdp or megatron.ddp.use_megatron_fsdp
    for key in ("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp"):
        fields[key] = _at(fields[key], switch)
    if spec.checkpoint is not None:
        written = "torch" if spec.checkpoint == "full" else spec.checkpoint
        for key, value in (("save", "checkpoint"), ("ckpt_format", written)):
            fields[f"checkpoint.{key}"] = _at(known.get("checkpoint"), value)
    return NativeConfig(
        format="spec",
        framework="megatron-bridge",
        fields=fields,
        version="0.6.0",  # only the rules of its core are wanted; this one has no flaw of its own
        packages=dict(versions),
    )


def rule_names(spec: ProfileSpec) -> dict[str, str]:
    """Return the names that rules use (``ddp.bucket_size``) -> keys of a spec."""
    paths = [path for path, _ in leaf_values(spec) if path.startswith(PREFIX)]
    shape = {name: path for name, path in _WORKLOAD.items() if name.startswith(("num", "hid"))}
    return {
        **{path.removeprefix(PREFIX): path for path in paths},
        **{f"model.{name}": path for name, path in shape.items()},
        "model.seq_length": _WORKLOAD["seq_length"],
    }


def _at(place: NativeField | None, value: Any) -> NativeField:
    return NativeField(value=value) if place is None else replace(place, value=value)


def _megatron_value(path: str, value: Any) -> Any:
    """Return a value as rules spell it: dtypes by Megatron's short names."""
    return _DTYPES.get(value, value) if path.endswith("_dtype") else value


def with_live(
    spec: ProfileSpec, fields: Mapping[str, ConfigValue], live: Mapping[str, Mapping[str, Any]]
) -> dict[str, ConfigValue]:
    """Return ``fields`` with what Megatron's live config objects say where they differ.

    ``live``: section -> field -> value, after wrapping.
    """
    changed = spec.config.megatron
    for name, values in live.items():
        section = getattr(changed, name, None)
        if section is None:
            continue
        new = {
            field: values[field]
            for field in section.__dataclass_fields__
            if field in values and _differs(values[field], getattr(section, field))
        }
        changed = replace(changed, **{name: replace(section, **new)})
    config = replace(spec.config, megatron=changed)
    seen = resolve_megatron(replace(spec, config=config), {})
    result = dict(fields)
    for key, value in seen.items():
        known = result.get(key)
        if known is not None and known.value != value.value:
            result[key] = replace(
                known,
                set=value.set,
                value=value.value,
                source="runtime",
                effective=value.effective,
                reason="as in Megatron's live config after wrapping",
            )
    return result


def _differs(live: Any, asked: Any) -> bool:
    same_dtype = asked in (None, "auto") and live in (None, "auto")
    return not same_dtype and bool(live != asked)
