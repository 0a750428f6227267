"""Megatron-Bridge: ``run_config.yaml``, YAML and Hydra overrides, the performance launcher.

``_target_`` is text here: nothing that it names is imported or called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.bridge_launcher import MARKERS, implied_fields, launcher_flags
from fsdp_doctor.config.loaders.bridge_summary import HEADING, summary_fields
from fsdp_doctor.config.loaders.hydra_text import overrides_in
from fsdp_doctor.config.loaders.launch_words import launcher_fields, script_position
from fsdp_doctor.config.loaders.megatron_fields import core_version_of, is_known_field
from fsdp_doctor.config.loaders.shell_eval import Command, Script, evaluate_script
from fsdp_doctor.config.loaders.structure import mapping_of, structure_of
from fsdp_doctor.config.loaders.targets import flatten_targets
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import NativeConfig, NativeField

FORMAT = "megatron_bridge"
SECTIONS = frozenset(
    {"checkpoint", "comm_overlap", "dataset", "ddp", "dist", "env_vars", "ft", "logger", "model"}
    | {"inprocess_restart", "mixed_precision", "nvrx_straggler", "optimizer", "peft", "profiling"}
    | {"optimizer_config_override_provider", "rerun_state_machine", "rng", "scheduler", "straggler"}
    | {"tensor_inspect", "tokenizer", "train", "validation", "launcher"}
)
_CONTAINER = "megatron.bridge.training.config.ConfigContainer"
_DUMP_BLOCK = re.compile(r"^-{4,} Task Configuration -{4,}\s*$", re.MULTILINE)
_OVERRIDE_LINE = re.compile(
    r"^\s*(?:\+{0,2})(?:ddp|dist|model|train|checkpoint|optimizer|comm_overlap|mixed_precision"
    r"|logger|scheduler|rng|dataset|peft|profiling|tokenizer)(?:\.\w+)*=",
    re.MULTILINE,
)
_OVERRIDE_WORD = re.compile(
    r"(?:^|\s)['\"]?\+{0,2}(?:ddp|dist|train|comm_overlap|mixed_precision|checkpoint|model"
    r"|optimizer)\.[a-z]\w*="
)


def detect(source: Source) -> int:
    """Bridge's config container, its sections, or its launcher's flags and overrides."""
    text = source.text
    if _CONTAINER in text:
        return 98
    if HEADING in text:
        return 95
    if any(marker in text for marker in MARKERS):
        return 90
    if _OVERRIDE_LINE.search(text) and not re.search(r"^\s*\[", text, re.MULTILINE):
        return 75
    if _OVERRIDE_WORD.search(text) and ("torchrun" in text or ".py" in text):
        return 75
    return _detect_sections(source)


def _detect_sections(source: Source) -> int:
    if not re.search(r"^(train|ddp|dist|model|checkpoint):", source.text, re.MULTILINE):
        return 0
    data = mapping_of(source)
    if not data or not set(data) <= SECTIONS | {"_target_"}:
        return 0
    score = 0
    for section in ("ddp", "dist", "train", "checkpoint", "model", "optimizer", "comm_overlap"):
        keys = data.get(section)
        if isinstance(keys, Mapping):
            known = sum(is_known_field(section, str(key)) is True for key in keys)
            score += 2 * known - len(keys)
    return 0 if score <= 0 else min(60 + 5 * score, 85)


def load(source: Source) -> NativeConfig:
    """Read the fields under Bridge's dotted names (``ddp.use_megatron_fsdp``)."""
    block = _DUMP_BLOCK.search(source.text)
    if block is not None and _CONTAINER in source.text:
        return _load_yaml(_inner(source, block.end()))
    if HEADING in source.text:
        return _overridden(summary_fields(source), [], {})
    if _OVERRIDE_LINE.search(source.text) and not _looks_like_command(source.text):
        return _load_lines(source)
    if _looks_like_command(source.text):
        return _load_command(source)
    return _load_yaml(source)


def _looks_like_command(text: str) -> bool:
    words = any(marker in text for marker in MARKERS) or _OVERRIDE_WORD.search(text)
    return bool(words) and bool(re.search(r"\.py\b|torchrun|\s-m\s|--\w", text))


def _inner(source: Source, start: int) -> Source:
    """Return the YAML of a log's configuration block."""
    lines = source.text[start:].splitlines()
    end = next((i for i, line in enumerate(lines) if line.startswith("-----")), len(lines))
    return Source(path=source.path, text="\n".join(lines[:end]) + "\n")


def _load_yaml(source: Source) -> NativeConfig:
    structure = structure_of(source)
    full = structure.data.get("_target_") == _CONTAINER
    fields = {
        path: NativeField(
            value=value,
            source="dump" if full else "file",
            file=source.name,
            line=structure.lines.get(path),
        )
        for path, value in flatten_targets(structure.data).items()
    }
    core = core_version_of(_names_by_section(fields)) if full else None
    return NativeConfig(
        format=FORMAT,
        framework="megatron-bridge",
        fields=fields,
        unknown=tuple(_unknown(fields)),
        unresolved=structure.notes,
        environment=_environment(structure.data.get("env_vars")),
        packages={} if core is None else {"megatron-core": core},
        nested=structure.data,
    )


def _names_by_section(fields: Mapping[str, NativeField]) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for path in fields:
        section, _, name = path.partition(".")
        if name and not name.startswith("_"):
            names.setdefault(section, set()).add(name.partition(".")[0])
    return names


def _environment(section: Any) -> dict[str, str]:
    if not isinstance(section, dict):
        return {}
    return {str(name): str(value) for name, value in section.items() if value is not None}


def _unknown(fields: Mapping[str, NativeField]) -> Iterator[str]:
    for path in fields:
        section, _, name = path.partition(".")
        if section in SECTIONS:
            if name and is_known_field(section, name.partition(".")[0]) is False:
                yield path
        elif section != "_target_":
            yield path


def _load_lines(source: Source) -> NativeConfig:
    """Read a text with one override a line."""
    fields: dict[str, NativeField] = {}
    skipped = []
    for number, line in enumerate(source.lines, 1):
        text = line.split(" #")[0].strip().rstrip("\\").strip()
        if not text or text.startswith("#"):
            continue
        found = overrides_in([text]) or overrides_in(text.split())
        if not found:
            section, equals, value = text.partition("=")
            if not equals or section.lstrip("+") not in SECTIONS:
                skipped.append(f"{source.name}:{number}: {text[:60]}: not an override")
                continue
            found = {0: (section.lstrip("+"), value.strip())}
        for key, value in found.values():
            fields[key] = NativeField(value=value, source="cli", file=source.name, line=number)
    return _overridden(fields, skipped, {})


def _load_command(source: Source) -> NativeConfig:
    script = evaluate_script(source.text, source.name)
    command = _training_command(script)
    if command is None:
        raise InputError(
            "no command with overrides or launcher flags found",
            where=source.name,
            hint="loops, functions and $(...) are not followed",
        )
    fields = _command_fields(command, source)
    environment = {**script.environment, **command.environment}
    return _overridden(fields, script.unresolved, environment)


def _command_fields(command: Command, source: Source) -> dict[str, NativeField]:
    words = command.words
    start = script_position(words)
    fields = launcher_fields(words[:start], source.name, command.lines[0])
    flags = launcher_flags(words[start:])
    found = implied_fields(flags)
    said = {position for _, position in found.values()}
    found |= {f"launcher.{n}": at for n, at in flags.items() if at[1] not in said}
    found |= {
        key: (value, position) for position, (key, value) in overrides_in(words[start:]).items()
    }
    for key, (value, position) in found.items():
        line = command.lines[start + position]
        fields[key] = NativeField(value=value, source="cli", file=source.name, line=line)
    return fields


def _training_command(script: Script) -> Command | None:
    best, most = None, 0
    for command in script.commands:
        if command.words[0] in ("echo", "printf"):
            continue
        hits = len(overrides_in(command.words))
        hits += sum(word.startswith(MARKERS) for word in command.words)
        hits += any(MARKERS[0] in word for word in command.words)
        if hits >= max(most, 1):
            best, most = command, hits
    return best


def _overridden(
    fields: dict[str, NativeField], unresolved: list[str], environment: dict[str, str]
) -> NativeConfig:
    return NativeConfig(
        format=FORMAT,
        framework="megatron-bridge",
        fields=fields,
        unknown=tuple(_unknown(fields)),
        unresolved=tuple(unresolved),
        environment=environment,
    )
