"""From a Megatron-Bridge ``run_config.yaml`` to a spec that can be profiled here, and what changed.

Sections and field names are the same; parallel sizes other than data parallel, low-precision
formats and Transformer Engine's features are left out, and every such change is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fsdp_doctor.config.loaders import load_native
from fsdp_doctor.config.resolvers.mcore_settings import dtype_name
from fsdp_doctor.config.spec import WrittenSpec, load_written_spec, written_spec_from_mapping
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import NativeConfig
from fsdp_doctor.model.megatron_spec import MegatronConfig

_MARK = "megatron.bridge"
_READ_BYTES = 1 << 16
_SECTIONS = ("dist", "ddp", "model", "optimizer", "checkpoint")
_SHAPE = {
    "vocab": ("model.padded_vocab_size", "model.vocab_size"),
    "tied_embeddings": ("model.share_embeddings_and_output_weights",),
}
_LEFT_OUT: dict[str, Any] = {
    "model.tensor_model_parallel_size": 1,
    "model.pipeline_model_parallel_size": 1,
    "model.context_parallel_size": 1,
    "model.expert_model_parallel_size": 1,
    "model.sequence_parallel": False,
    "model.num_moe_experts": None,
    "model.fp8": None,
    "model.fp4": None,
    "model.fp16": False,
    "model.gradient_accumulation_fusion": False,
    "model.cpu_offloading": False,
    "model.fine_grained_activation_offloading": False,
    "model.cuda_graph_impl": "none",
    "optimizer.use_precision_aware_optimizer": False,
    "ddp.nccl_ub": False,
    "peft": None,
    "comm_overlap": None,
}
"""Fields that matter and are not built here -> what holds in the profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of the profile's model, where it is not the job's."""

    layers: int | None = None
    hidden: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledConfig:
    """A spec, and what of the original config it does not keep."""

    written: WrittenSpec
    notes: tuple[str, ...] = ()


def load_profiled(path: Path, overrides: Sequence[str], scale: Scale) -> ProfiledConfig:
    """Read a spec, or a Megatron-Bridge config as one.

    Raises InputError when neither can be read, or a spec is to be scaled.
    """
    if _is_bridge(path):
        return _from_bridge(load_native([path]), path, overrides, scale)
    if scale != Scale():
        raise InputError(
            "--layers and --hidden scale a Megatron-Bridge config",
            where=str(path),
            hint="in a spec: --set workload.model.layers=N",
        )
    return ProfiledConfig(written=load_written_spec(path, overrides))


def _is_bridge(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            head = stream.read(_READ_BYTES)
    except OSError:
        return False  # the spec loader says what is wrong
    return f"_target_: {_MARK}".encode() in head


def _from_bridge(
    native: NativeConfig, path: Path, overrides: Sequence[str], scale: Scale
) -> ProfiledConfig:
    values = {key: field.value for key, field in native.fields.items()}
    notes = list(_left_out(values))
    shape, changes = _shape(values, scale, path)
    notes += changes
    sections = {name: _section(name, values) for name in _SECTIONS}
    notes += _precision(values, sections)
    micro = values.get("train.micro_batch_size") or 1
    raw: dict[str, Any] = {
        "name": path.stem,
        "workload": {
            "model": shape,
            "micro_batch": micro,
            "sequence_length": _first(values, "model.seq_length", "dataset.sequence_length")
            or 1024,
        },
        "config": {"strategy": "megatron", "megatron": sections},
    }
    whole = values.get("train.global_batch_size")
    if whole is not None and whole != 2 * micro:
        notes.append(
            f"train.global_batch_size {whole}: one micro batch on each of 2 ranks here "
            "(--set world_size=..., config.gradient_accumulation.steps=...)"
        )
    return ProfiledConfig(
        written=written_spec_from_mapping(raw, str(path), overrides), notes=tuple(notes)
    )


def _first(values: dict[str, Any], *keys: str) -> Any:
    return next((values[key] for key in keys if values.get(key) is not None), None)


def _section(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a section that specs have too; dtypes by torch's names."""
    defaults = getattr(MegatronConfig(), name)
    found: dict[str, Any] = {}
    for field in fields(defaults):
        key = f"{name}.{field.name}"
        if key not in values:
            continue
        value = values[key]
        found[field.name] = dtype_name(value) if field.name.endswith("_dtype") else value
    return found


def _shape(
    values: dict[str, Any], scale: Scale, path: Path
) -> tuple[dict[str, Any], Iterator[str]]:
    """Return the model's shape, scaled as asked for; heads keep their width."""
    layers, hidden = values.get("model.num_layers"), values.get("model.hidden_size")
    heads = values.get("model.num_attention_heads")
    if not (layers and hidden and heads):
        raise InputError(
            "the config does not tell num_layers, hidden_size and num_attention_heads",
            where=str(path),
            hint="use the run_config.yaml that a job wrote",
        )
    width = scale.hidden or hidden
    shape: dict[str, Any] = {
        "layers": scale.layers or layers,
        "hidden": width,
        "heads": max(1, heads * width // hidden),
        "ffn": (values.get("model.ffn_hidden_size") or 4 * hidden) * width // hidden,
    }
    groups = values.get("model.num_query_groups")
    if groups:
        shape["kv_heads"] = max(1, shape["heads"] * groups // heads)
    for name, keys in _SHAPE.items():
        value = _first(values, *keys)
        if value is not None:
            shape[name] = value
    before = {"layers": layers, "hidden": hidden, "heads": heads}
    changed = (f"{k}: {v} -> {shape[k]}" for k, v in before.items() if v != shape[k])
    return shape, changed


def _precision(values: dict[str, Any], sections: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Apply ``mixed_precision``, which Bridge lays over model and ddp before training."""
    mixed = values.get("mixed_precision")
    fp32 = values.get("mixed_precision.grad_reduce_in_fp32")
    if mixed in ("bf16_mixed", "bf16-mixed") or values.get("mixed_precision.bf16"):
        sections["model"]["bf16"] = True
        sections["ddp"]["grad_reduce_in_fp32"] = True if fp32 is None else fp32
    elif mixed is not None:
        yield f"mixed_precision {mixed}: not known here; model.bf16 as written"


def _left_out(values: dict[str, Any]) -> Iterator[str]:
    for key, kept in _LEFT_OUT.items():
        value = values.get(key)
        present = key in values or any(other.startswith(f"{key}.") for other in values)
        if (present and value not in (kept, None, False)) or (present and key not in values):
            shown = "given" if value is None else value
            yield f"{key} {shown}: {'off' if kept in (None, False, 'none') else kept} here"
