"""Versions of frameworks: comparing them, and whose package a framework's rules follow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fsdp_doctor.errors import InputError

PACKAGES: dict[str, str] = {
    "hf-trainer": "transformers",
    "llama-factory": "transformers",
    "megatron-lm": "megatron-core",
    "composer": "composer",
    "gpt-neox": "deepspeed",
}
"""Framework -> package whose version decides on its rules; the others bear the package's name."""

_ALIASES = {
    "pytorch": "torch",
    "hf": "transformers",
    "huggingface": "transformers",
    "megatron": "megatron-core",
    "mcore": "megatron-core",
    "core": "megatron-core",
    "pytorch-lightning": "lightning",
    "llm-foundry": "composer",
    "mosaicml": "composer",
}
_NEWEST = (1 << 30,)


def package_of(framework: str) -> str:
    """Return the package whose version decides on a framework's rules."""
    return PACKAGES.get(framework, framework)


def canonical_name(name: str) -> str:
    """Return the package that ``name`` (a framework, package or short name) stands for."""
    folded = name.strip().lower().replace("_", "-")
    return package_of(_ALIASES.get(folded, folded))


def key_of(version: str) -> tuple[int, ...]:
    """Return a version as a tuple that sorts; ``HEAD`` and ``main`` are the newest.

    Text without a number sorts first.
    """
    folded = version.strip().lower()
    if folded in ("head", "main", "master", "latest", "nightly"):
        return _NEWEST
    match = re.search(r"\d+(?:\.\d+)*", folded)
    return tuple(int(part) for part in match[0].split(".")[:6]) if match else ()


def at_least(version: str | None, floor: str) -> bool:
    """Return whether ``version`` is ``floor`` or later; ``5.10`` counts as ``5.10.0``."""
    if version is None:
        return False
    have, want = list(key_of(version)), list(key_of(floor))
    length = max(len(have), len(want))
    have += [0] * (length - len(have))
    want += [0] * (length - len(want))
    return have >= want


def parse_versions(texts: Sequence[str], option: str = "--framework-version") -> dict[str, str]:
    """Return ``NAME=VERSION`` texts by package.

    Raises InputError when one is not of that form.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, version = text.partition("=")
        version = version.strip().lstrip("=")
        if not equals or not name.strip() or not key_of(version):
            raise InputError(
                "not of the form NAME=VERSION",
                where=f"option {option} {text}",
                hint="e.g. transformers=5.10",
            )
        found[canonical_name(name)] = version
    return found


def version_for(
    framework: str, versions: Mapping[str, str], packages: Mapping[str, str]
) -> str | None:
    """Return the version of a framework: as asked for, else as the config names it."""
    name = package_of(framework)
    for known in (versions, packages):
        for key in (name, framework):
            if key in known:
                return known[key]
    return None
