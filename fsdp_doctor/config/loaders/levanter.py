"""Levanter's YAML (JAX): no resolver, so its keys are compared as they stand."""

from __future__ import annotations

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of, word_set
from fsdp_doctor.model.config import NativeConfig

FORMAT = "levanter"
_TRAINER = word_set(
    """per_device_parallelism per_device_eval_parallelism train_batch_size num_train_steps mp
    fsdp_axis batch_axis model_axis_size axis_resources tensor_parallel_axes tracker"""
)


def detect(source: Source) -> int:
    """A ``trainer`` with mesh axes."""
    trainer = mapping_of(source).get("trainer")
    if not isinstance(trainer, dict):
        return 0
    found = len(_TRAINER & set(trainer))
    return 96 if found >= 4 else 70 if found == 3 else 0


def load(source: Source) -> NativeConfig:
    """Return the keys as written."""
    structure = structure_of(source)
    return NativeConfig(
        format=FORMAT,
        framework="levanter",
        fields=fields_of(structure, source),
        unresolved=structure.notes,
        nested=structure.data,
    )
