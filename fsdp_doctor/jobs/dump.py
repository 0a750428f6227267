"""The config that a job printed when it started, and the versions of what it ran with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fsdp_doctor.config.load import LoadedConfig, load_config, resolve_native
from fsdp_doctor.config.loaders import load_source
from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.errors import InputError
from fsdp_doctor.jobs.heads import head_of

_DUMPS = (
    re.compile(r"-{4,} arguments -{4,}"),  # Megatron-LM
    re.compile(r"Configuration Summary \(Non-Default Values|------- Task Configuration -------"),
)
"""Headings of the dumps that ``config.loaders`` reads out of a log."""
_VERSIONS = (
    ("deepspeed", re.compile(r"DeepSpeed info: version=([\w.+-]+)")),
    ("torch", re.compile(r"(?i)\b(?:py)?torch version[ .:=]+(\d[\w.+-]*)")),
    ("megatron-core", re.compile(r"(?i)\bmegatron[-_. ]core(?: version)?[ :=]+v?(\d+\.[\w.+-]+)")),
    ("transformers", re.compile(r"(?i)\btransformers(?: version)?[ :=]+v?(\d+\.[\w.+-]+)")),
    ("nccl", re.compile(r"NCCL version (\d+\.[\d.]+)")),
)
"""Package -> how jobs print its version."""


def is_dump(text: str) -> bool:
    """Return whether a dump that can be read stands in a log."""
    return any(pattern.search(text) for pattern in _DUMPS)


def find_config(logs: Sequence[Path], beside: Sequence[Path]) -> LoadedConfig | None:
    """Return the config of a job: of the files given beside its logs, else the first dump in them.

    None: no log holds a dump. Raises InputError when a dump or file cannot be read.
    """
    if beside:
        return load_config("+".join(str(path) for path in beside))
    for path in logs:
        text = head_of(path)
        if is_dump(text):
            return resolve_native(load_source(Source(path=path, text=text)))
    return None


def versions_in(logs: Sequence[Path]) -> dict[str, str]:
    """Return package -> version as the logs print them, the first one of each."""
    found: dict[str, str] = {}
    for path in logs:
        try:
            text = head_of(path)
        except InputError:
            continue
        for package, pattern in _VERSIONS:
            told = pattern.search(text)
            if told is not None:
                found.setdefault(package, told[1])
    return found
