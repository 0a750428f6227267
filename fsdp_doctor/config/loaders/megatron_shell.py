"""A Megatron-LM command line, or the shell script around it."""

from __future__ import annotations

import re

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.launch_words import launcher_fields, script_position
from fsdp_doctor.config.loaders.megatron_flags import megatron_words, parse_arguments
from fsdp_doctor.config.loaders.shell_eval import Command, Script, evaluate_script
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import NativeConfig, NativeField

FORMAT = "megatron_shell"
_FLAGS = re.compile(
    r"--(?:num-layers|hidden-size|micro-batch-size|global-batch-size|tensor-model-parallel-size"
    r"|use-mcore-models|use-distributed-optimizer|use-megatron-fsdp|use-torch-fsdp2|train-iters"
    r"|num-attention-heads|overlap-grad-reduce|recompute-granularity|bf16|ckpt-format)\b"
)
_SCRIPT = re.compile(r"\bpretrain_\w+\.py\b|^#!.*\bsh\b|\btorchrun\b", re.MULTILINE)
_MARKUP = re.compile(r"^\s*[\[{]|^[A-Za-z_]\w*:(?:\s|$)", re.MULTILINE)


def detect(source: Source) -> int:
    """A shell text with several of Megatron-LM's flags."""
    flags = len(set(_FLAGS.findall(source.text)))
    if flags < 2 and not (flags and source.path.suffix in (".sh", ".bash", ".args", ".txt")):
        return 0
    if "----- arguments -----" in source.text or "MODEL_ARGS:" in source.text:
        return 0
    if source.json is not None or len(_MARKUP.findall(source.text)) > flags:
        return 0
    return 85 if _SCRIPT.search(source.text) or source.path.suffix in (".sh", ".bash") else 70


def load(source: Source) -> NativeConfig:
    """Read the flags of the training command; nothing is executed."""
    script = evaluate_script(source.text, source.name)
    command = training_command(script)
    if command is None:
        raise InputError(
            "no command with Megatron-LM flags found",
            where=source.name,
            hint="loops, functions and $(...) are not followed; give the argument dump of the log",
        )
    return native_from_command(script, command, source)


def training_command(script: Script) -> Command | None:
    """Return the command with the most Megatron-LM flags, the last of several."""
    best, most = None, 0
    for command in script.commands:
        flags = megatron_words(command.words)
        if flags >= max(most, 1):
            best, most = command, flags
    return best


def native_from_command(script: Script, command: Command, source: Source) -> NativeConfig:
    """Return the native config of one expanded training command."""
    start = script_position(command.words)
    fields = launcher_fields(command.words[:start], source.name, command.lines[0])
    unknown = []
    for argument in parse_arguments(command.words[start:]):
        line = command.lines[start + argument.position]
        fields[argument.name] = NativeField(
            value=argument.value, source="cli", file=source.name, line=line
        )
        if not argument.known:
            unknown.append(argument.name)
    return NativeConfig(
        format=FORMAT,
        framework="megatron-lm",
        fields=fields,
        unknown=tuple(dict.fromkeys(unknown)),
        unresolved=tuple(script.unresolved),
        environment={**script.environment, **command.environment},
    )
