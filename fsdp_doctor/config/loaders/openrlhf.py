"""A launch script of OpenRLHF, or its command line."""

from __future__ import annotations

import re

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.launch_words import launcher_fields
from fsdp_doctor.config.loaders.shell_eval import evaluate_script
from fsdp_doctor.config.yaml_source import plain_scalar
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import NativeConfig, NativeField

FORMAT = "openrlhf"
_MODULE = re.compile(r"\bopenrlhf[./]cli[./]train_\w+")
_CONTINUED = re.compile(r"(?:[^\\\n]|\\[^\n]|\\\n)*")
"""A line with the lines that its backslashes continue."""


def detect(source: Source) -> int:
    """A module of ``openrlhf.cli`` is started; its programs read the same flags."""
    return 96 if source.json is None and _MODULE.search(source.text) else 0


def load(source: Source) -> NativeConfig:
    """Read the flags of the training command; nothing is executed."""
    script = evaluate_script(source.text, source.name)
    notes = script.unresolved
    for command in reversed(script.commands):
        start = next((i for i, word in enumerate(command.words) if _MODULE.search(word)), None)
        if start is not None:
            # the command stands in one word where it is built as a text (ray, bash -c)
            words = [part for word in command.words[start:] for part in word.split()]
            lines = [command.lines[start]] * len(words)
            if len(words) == len(command.words) - start:
                lines = list(command.lines[start:])
            fields = launcher_fields(command.words[:start], source.name, command.lines[0])
            break
    else:
        words, lines = _written_words(source)
        fields = {}
        notes = [f"{source.name}:{at}: {w}" for w, at in zip(words, lines, strict=True) if "$" in w]
    fields |= _flags(words[1:], lines[1:], source.name)
    return NativeConfig(
        format=FORMAT,
        framework="openrlhf",
        fields=fields,
        unresolved=tuple(notes),
        environment=script.environment,
    )


def _written_words(source: Source) -> tuple[list[str], list[int]]:
    """Return the words behind the module's name, where no command holds it (a here-document)."""
    found = _MODULE.search(source.text)
    if found is None:
        raise InputError("no command of openrlhf.cli found", where=source.name)
    continued = _CONTINUED.match(source.text, found.start())
    assert continued is not None
    words, lines = [], []
    first = source.text.count("\n", 0, found.start()) + 1
    for offset, line in enumerate(continued.group().split("\n")):
        for word in line.removesuffix("\\").split():
            words.append(word.strip("'\""))
            lines.append(first + offset)
    return words, lines


def _flags(words: list[str], lines: list[int], source: str) -> dict[str, NativeField]:
    found: dict[str, NativeField] = {}
    name: str | None = None
    values: list[str] = []
    line = 0

    def keep() -> None:
        if name is not None:
            scalars = [plain_scalar(value) for value in values]
            value = True if not scalars else scalars[0] if len(scalars) == 1 else scalars
            found[name] = NativeField(value=value, source="cli", file=source, line=line)

    for word, at in zip(words, lines, strict=True):
        if word.startswith("--") and len(word) > 2:
            keep()
            name, equals, value = word[2:].partition("=")
            values, line = ([value] if equals else []), at
        else:
            values.append(word)
    keep()
    return found
