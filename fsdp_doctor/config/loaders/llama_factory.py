"""LLaMA-Factory's YAML: HF TrainingArguments with keys of its own (v0), or ``dist_config`` (v1)."""

from __future__ import annotations

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.hf_trainer import unknown_arguments
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of
from fsdp_doctor.model.config import NativeConfig

FORMAT = "llama_factory"


def detect(source: Source) -> int:
    """``finetuning_type`` and ``stage``, or v1's ``dist_config`` and ``model_class``."""
    data = mapping_of(source)
    if "finetuning_type" in data or ("stage" in data and "template" in data):
        return 97
    if isinstance(data.get("dist_config"), dict) and ("model_class" in data or "model" in data):
        return 97
    return 60 if {"cutoff_len", "template", "dataset"} <= set(data) else 0


def load(source: Source) -> NativeConfig:
    """Return the keys as written."""
    structure = structure_of(source)
    return NativeConfig(
        format=FORMAT,
        framework="llama-factory",
        fields=fields_of(structure, source),
        unknown=unknown_arguments(structure.data),
        unresolved=structure.notes,
        nested=structure.data,
    )
