"""torchtitan's TOML of all generations, and the JSON that ``--debug.save_config_file`` writes."""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of, word_set
from fsdp_doctor.model.config import NativeConfig

FORMAT = "torchtitan"
_SECTIONS = word_set(
    """job profiling metrics model optimizer lr_scheduler training parallelism checkpoint
    activation_checkpoint float8 quantize comm memory_estimation fault_tolerance experimental
    validation compile mx debug profiler loss dataloader tokenizer model_spec override
    activation_checkpointing"""
)


def detect(source: Source) -> int:
    """``[training]`` beside torchtitan's other tables."""
    data = mapping_of(source)
    training = data.get("training")
    if not isinstance(training, dict):
        return 0
    tables = set(data) & _SECTIONS
    if len(tables) * 3 < len(data) * 2:
        return 0
    score = 40 + 12 * len(tables & {"job", "parallelism", "activation_checkpoint", "metrics"})
    if structure_of(source).syntax == "toml":
        score += 20
    return min(score + 4 * len(tables), 98)


def load(source: Source) -> NativeConfig:
    """Return the keys; the generation of the file, told by its keys, is the version."""
    structure = structure_of(source)
    return NativeConfig(
        format=FORMAT,
        framework="torchtitan",
        fields=fields_of(structure, source),
        version=_generation(structure.data),
        unknown=tuple(key for key in structure.data if key not in _SECTIONS),
        unresolved=structure.notes,
        nested=structure.data,
    )


def _generation(data: dict[str, Any]) -> str | None:
    """Return the version whose keys a file has, or None when they are in all."""
    training, checkpoint = _table(data, "training"), _table(data, "checkpoint")
    if "data_parallel_degree" in training:
        return "0.0.1"
    if any(key.startswith("num_tokens_per_microbatch") for key in training):
        return "HEAD"
    newer = (
        "enable" in checkpoint
        or "last_save_model_only" in checkpoint
        or "quantize" in data
        or "hf_assets_path" in _table(data, "model")
        or "compile" in data
    )
    if newer:
        return "0.2.2"
    older = "enable_checkpoint" in checkpoint or "compile" in training or "float8" in data
    return "0.1.0" if older or "batch_size" in training else None


def _table(data: dict[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name)
    return value if isinstance(value, dict) else {}
