"""Environment files: ``KEY=VALUE`` lines, with or without ``export``; given beside a config."""

from __future__ import annotations

import re

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.parts import ENVIRONMENT
from fsdp_doctor.model.config import NativeConfig, NativeField
from fsdp_doctor.redact import redact

FORMAT = "env"
_LINE = re.compile(r"^\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$")
_PACKAGE = re.compile(r"^\s*([A-Za-z0-9][A-Za-z0-9._\-]*)==([0-9][^\s;]*)\s*$")


def detect(source: Source) -> int:
    """Every line that says something is an assignment, most names in capitals."""
    names = []
    for line in source.lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.match(text)
        if _PACKAGE.match(text):
            names.append("PACKAGE")
        elif match is None:
            return 0
        else:
            names.append(match[1])
    capitals = sum(name.isupper() for name in names)
    return 95 if names and capitals * 2 > len(names) else 0


def load(source: Source) -> NativeConfig:
    """Return the variables, and versions of packages (``name==1.2`` lines); secrets go."""
    fields: dict[str, NativeField] = {}
    packages: dict[str, str] = {}
    for number, line in enumerate(source.lines, 1):
        package = _PACKAGE.match(line)
        if package:
            packages[package[1].lower()] = package[2]
            continue
        match = _LINE.match(line)
        if match is None or line.lstrip().startswith("#"):
            continue
        value = redact(_unquoted(match[2]), match[1])
        fields[match[1]] = NativeField(value=value, source="env", file=source.name, line=number)
    return NativeConfig(
        format=FORMAT,
        framework=ENVIRONMENT,
        fields=fields,
        environment={name: str(field.value) for name, field in fields.items()},
        packages=packages,
    )


def _unquoted(text: str) -> str:
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text.split(" #", 1)[0].rstrip()
