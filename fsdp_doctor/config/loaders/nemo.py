"""NeMo 1 (Hydra YAML) and NeMo 2 (``_target_`` YAML, or overrides of a recipe in ``MODEL_ARGS``).

``${a.b}`` is filled in within the file; other interpolations (``${multiply:...}``) are told.
"""

from __future__ import annotations

import re

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import Structure, structure_of
from fsdp_doctor.config.loaders.target_fields import environment_of, target_fields
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import NativeConfig, NativeField

FORMAT = "nemo"
_NEMO2 = re.compile(r"_target_:\s*['\"]?nemo\.(?:lightning|collections\.llm)\b")
_NEMO1 = re.compile(r"^\s+tensor_model_parallel_size:", re.MULTILINE)
_RECIPE = re.compile(r"^\s+['\"]?(?:trainer|model|data)\.\w", re.MULTILINE)


def detect(source: Source) -> int:
    """NeMo's classes, or a model section with Megatron's sizes beside a trainer."""
    text = source.text
    if "MODEL_ARGS" in text:
        return 94 if _RECIPE.search(text) else 0
    if _NEMO2.search(text):
        return 92
    if not _NEMO1.search(text) or "megatron_cfg" in text or "dtensor_cfg" in text:
        return 0
    sections = len(re.findall(r"^(?:trainer|model|exp_manager|run):", text, re.MULTILINE))
    marked = any(word in text for word in ("megatron_amp_O2", "mcore_gpt", "exp_manager"))
    return 91 if sections >= 2 and marked else 60 if sections >= 2 else 0


def load(source: Source) -> NativeConfig:
    """Read the keys as they stand, references filled in."""
    structure = structure_of(source)
    recipe = "MODEL_ARGS" in structure.data
    fields, notes = _recipe(structure, source) if recipe else target_fields(structure, source)
    if "training.model." in source.text:
        fields, notes = _without_root(source)
    return NativeConfig(
        format=FORMAT,
        framework="nemo",
        fields=fields,
        unresolved=(*structure.notes, *notes),
        environment=environment_of(structure.data.get("ENV_VARS")),
        nested=structure.data,
    )


def _recipe(structure: Structure, source: Source) -> tuple[dict[str, NativeField], tuple[str, ...]]:
    arguments = structure.data["MODEL_ARGS"] or {}
    if not isinstance(arguments, dict):
        raise InputError("MODEL_ARGS is not a mapping", where=source.name)
    fields = {
        str(key): NativeField(
            value=value, file=source.name, line=structure.lines.get(f"MODEL_ARGS.{key}")
        )
        for key, value in arguments.items()
    }
    for key, value in structure.data.items():
        if key not in ("MODEL_ARGS", "ENV_VARS"):
            fields[f"recipe.{key}"] = NativeField(value=value, file=source.name)
    return fields, ()


def _without_root(source: Source) -> tuple[dict[str, NativeField], tuple[str, ...]]:
    """Read ``${training.model.x}`` as ``${model.x}``: a launcher hangs the file there."""
    text = source.text.replace("${training.", "${")
    inner = Source(path=source.path, text=text)
    return target_fields(structure_of(inner), source)
