"""NeMo Automodel, both generations: ``distributed.strategy`` and ``distributed._target_``."""

from __future__ import annotations

import re

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import structure_of
from fsdp_doctor.config.loaders.target_fields import target_fields
from fsdp_doctor.model.config import NativeConfig

FORMAT = "nemo_automodel"
_NAMED = re.compile(r"\bnemo_automodel\.\w|\bNeMoAutoModel\w*")
_SECTIONS = re.compile(r"^(?:step_scheduler|distributed|dist_env|packed_sequence):", re.MULTILINE)


def detect(source: Source) -> int:
    """Automodel's classes, or its sections."""
    sections = len(set(_SECTIONS.findall(source.text)))
    if _NAMED.search(source.text):
        return 96 if sections else 70
    return 80 if sections >= 3 else 0


def load(source: Source) -> NativeConfig:
    """Read the keys as they stand, references filled in."""
    structure = structure_of(source)
    fields, notes = target_fields(structure, source)
    return NativeConfig(
        format=FORMAT,
        framework="nemo-automodel",
        fields=fields,
        unresolved=(*structure.notes, *notes),
        nested=structure.data,
    )
