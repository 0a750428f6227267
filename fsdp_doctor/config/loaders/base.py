"""What a loader is, and the bounded, safe reading that all of them share.

A loader is one module beside this one with

- ``FORMAT``: its name;
- ``detect(source) -> int``: how sure it is that ``source`` is its format, 0 (no) to 100 (only this
  format looks like that), from content, cheaply and without raising;
- ``load(source) -> NativeConfig``: the native keys as written. Nothing is executed, imported or
  instantiated; what cannot be known statically is said in ``unresolved``.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import NativeConfig, NativeField

MAX_CONFIG_BYTES = 8 << 20
"""Configs are small; a log with an argument dump is read as lines (see ``Source.lines``)."""


class Loader(Protocol):
    """A module of this package."""

    FORMAT: str

    def detect(self, source: Source) -> int:
        """Return how sure the loader is, 0 to 100."""

    def load(self, source: Source) -> NativeConfig:
        """Read the native config."""


@dataclass(frozen=True)
class Source:
    """One file, read once. Parsed views are None where the text is not of that syntax."""

    path: Path
    text: str = field(repr=False)

    @property
    def name(self) -> str:
        """The path as the user gave it."""
        return str(self.path)

    @cached_property
    def json(self) -> Any:
        """The JSON value, or None."""
        if not self.text.lstrip().startswith(("{", "[")):
            return None
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            return None

    @cached_property
    def toml(self) -> dict[str, Any] | None:
        """The TOML table, or None."""
        try:
            return tomllib.loads(self.text)
        except (tomllib.TOMLDecodeError, RecursionError):
            return None

    @cached_property
    def lines(self) -> list[str]:
        """The lines, without their ends."""
        return self.text.splitlines()


def read_source(path: Path) -> Source:
    """Read a config file as text.

    Raises InputError for a missing, empty, too large, binary or non-UTF-8 file.
    """
    where = str(path)
    try:
        if path.is_dir():
            raise InputError("is a directory", where=where, hint="give a config file")
        with path.open("rb") as stream:
            raw = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InputError(error.strerror or str(error), where=where) from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise InputError(f"larger than {MAX_CONFIG_BYTES} bytes: not a config", where=where)
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError("is UTF-16", where=where, hint="save it as UTF-8")
    if b"\0" in raw:
        raise InputError("is a binary file", where=where, hint="give a text config")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 (byte {error.start})", where=where) from None
    if not text.strip():
        raise InputError("is empty", where=where)
    return Source(path=path, text=text.replace("\r\n", "\n"))


def flatten(nested: Any, source: Source, prefix: str = "") -> dict[str, NativeField]:
    """Return the leaves of nested mappings under dotted keys; lists stay whole."""
    found: dict[str, NativeField] = {}
    for key, value in nested.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            found |= flatten(value, source, f"{path}.")
        else:
            found[path] = NativeField(value=value, file=source.name)
    return found
