"""Megatron-LM's YAML: test recipes (``MODEL_ARGS``, ``ENV_VARS``) and ``--yaml-cfg`` files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.megatron_flags import argument, flag_table
from fsdp_doctor.config.loaders.structure import Structure, fields_of, structure_of
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import NativeConfig, NativeField

FORMAT = "megatron_recipe"
_SECTIONS = ("language_model", "model_parallel")
"""Nested sections of a ``--yaml-cfg`` file; their keys are arguments as those outside are."""


def detect(source: Source) -> int:
    """``MODEL_ARGS`` with flags, or the sections of a ``--yaml-cfg`` file."""
    text = source.text
    if re.search(r"^['\"]?MODEL_ARGS['\"]?:", text, re.MULTILINE):
        return 0 if re.search(r"^\s+['\"]?(trainer|model|data)\.\w", text, re.MULTILINE) else 95
    if all(f"\n{section}:" in f"\n{text}" for section in _SECTIONS):
        return 90
    return 0


def load(source: Source) -> NativeConfig:
    """Read the arguments and environment variables of a recipe."""
    structure = structure_of(source)
    if "MODEL_ARGS" not in structure.data:
        return _yaml_cfg(structure, source)
    arguments = structure.data["MODEL_ARGS"] or {}
    if not isinstance(arguments, dict):
        raise InputError("MODEL_ARGS is not a mapping", where=source.name)
    fields: dict[str, NativeField] = {}
    unknown = []
    for flag, value in arguments.items():
        path = f"MODEL_ARGS.{flag}"
        name, read, known = _argument(str(flag), value)
        fields[name] = _field(read, structure, source, path)
        if not known:
            unknown.append(name)
    for key, value in structure.data.items():
        if key not in ("MODEL_ARGS", "ENV_VARS"):
            fields[f"recipe.{key}"] = _field(value, structure, source, key)
    return NativeConfig(
        format=FORMAT,
        framework="megatron-lm",
        fields=fields,
        unknown=tuple(unknown),
        unresolved=(*structure.notes, *_unresolved(fields)),
        environment=_environment(structure.data.get("ENV_VARS")),
        nested=structure.data,
    )


def _argument(flag: str, value: Any) -> tuple[str, Any, bool]:
    """Return name, value and whether it is known; ``false`` means that a flag is not given."""
    if value is True:
        read = argument(flag.removeprefix("--"), [], 0)
        return read.name, read.value, read.known
    words = value if isinstance(value, list) else str(value).strip("[]").split()
    read = argument(flag.removeprefix("--"), [str(word) for word in words], 0)
    if isinstance(value, bool) and isinstance(read.value, bool):
        return read.name, not read.value, read.known
    return read.name, read.value, read.known


def _field(value: Any, structure: Structure, source: Source, path: str) -> NativeField:
    return NativeField(value=value, file=source.name, line=structure.lines.get(path))


def _environment(section: Any) -> dict[str, str]:
    if not isinstance(section, dict):
        return {}
    return {str(name): str(value) for name, value in section.items() if value is not None}


def _unresolved(fields: dict[str, NativeField]) -> Iterator[str]:
    for name, field in fields.items():
        if isinstance(field.value, str) and "${" in field.value:
            yield f"{field.file}:{field.line}: {name}: {field.value}"


def _yaml_cfg(structure: Structure, source: Source) -> NativeConfig:
    """Read a ``--yaml-cfg`` file; keys of its nested sections are arguments."""
    flat: dict[str, NativeField] = {}
    for path, field in fields_of(structure, source).items():
        section, _, name = path.partition(".")
        flat[name if section in _SECTIONS else path] = field
    known = flag_table()
    return NativeConfig(
        format=FORMAT,
        framework="megatron-lm",
        fields=flat,
        unknown=tuple(name for name in flat if name not in known and name not in _ONLY_IN_YAML),
        unresolved=(*structure.notes, *_unresolved(flat)),
        nested=structure.data,
    )


_ONLY_IN_YAML = frozenset(
    {
        "activation_func",
        "autocast_dtype",
        "cpu_offloading",
        "cpu_offloading_activations",
        "cpu_offloading_weights",
        "enable_autocast",
        "fp8_dot_product_attention",
        "fp8_multi_head_attention",
        "gated_linear_unit",
        "model_type",
        "params_dtype",
        "perform_initialization",
        "pipeline_dtype",
    }
)
"""Fields of Megatron's config classes that no flag sets."""
