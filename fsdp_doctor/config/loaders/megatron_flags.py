"""Megatron-LM's command line by version: which flag sets what, and to which default.

``config/data/megatron_flags.json`` maps a name to first version, last version, default (or defaults
by the version from which they hold), and flags: null for one flag of that name that takes a value,
true for a switch of that name, else each flag with the value that it stores (null: it takes one).
Source: the argument parsers of megatron-core 0.12 to 0.20 (development).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fsdp_doctor.config.yaml_source import plain_scalar

Version = tuple[int, ...]
NEWEST: Version = (0, 20)


@dataclass(frozen=True, slots=True)
class Flag:
    """One name of Megatron-LM's arguments."""

    first: Version
    last: Version
    defaults: tuple[tuple[Version, Any], ...]
    """Version from which a default holds, and the default; oldest first."""

    def known(self, version: Version) -> bool:
        """Return whether the argument exists in a version."""
        return self.first <= version[:2] <= self.last

    def default(self, version: Version) -> Any:
        """Return the default in a version, or the oldest known one."""
        value = self.defaults[0][1]
        for since, default in self.defaults:
            if version[:2] >= since:
                value = default
        return value


def parse_version(text: str) -> Version:
    """Return ``0.18.0`` as numbers; a part that is no number ends it."""
    numbers: list[int] = []
    for part in text.lstrip("v").split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not digits or not part[0].isdigit():
            break
        numbers.append(int(digits))
        if len(digits) != len(part):
            break
    return tuple(numbers) or NEWEST


def _data(name: str) -> Any:
    return json.loads((files("fsdp_doctor.config") / "data" / name).read_text(encoding="utf-8"))


@cache
def flag_table() -> Mapping[str, Flag]:
    """Return every argument by its name (argparse's ``dest``)."""
    table = {}
    for name, (first, last, default, _) in _data("megatron_flags.json").items():
        by_version = default if isinstance(default, dict) else {first: default}
        defaults = tuple((parse_version(since), value) for since, value in by_version.items())
        table[name] = Flag(parse_version(first), parse_version(last), defaults)
    return table


@cache
def flag_spellings() -> Mapping[str, tuple[str, Any]]:
    """Return for each flag, without its dashes, the name it sets and what it stores.

    What it stores is None where the flag takes a value.
    """
    spellings: dict[str, tuple[str, Any]] = {}
    for name, (_, _, _, flags) in _data("megatron_flags.json").items():
        if flags is None or flags is True:
            spellings[name.replace("_", "-")] = (name, flags)
        else:
            spellings |= {flag: (name, stored) for flag, stored in flags.items()}
    return spellings


@dataclass(frozen=True, slots=True)
class Argument:
    """One flag on a command line."""

    name: str
    """Argparse's ``dest``, or the flag itself, with underscores, where it is not known."""
    value: Any
    position: int
    """Of the flag among the words."""
    known: bool


def parse_arguments(words: Iterable[str]) -> list[Argument]:
    """Read ``--flag``, ``--flag value ...`` and ``--flag=value`` as Megatron-LM's parser would."""
    found: list[Argument] = []
    flag: str | None = None
    values: list[str] = []
    start = 0
    for position, word in enumerate(words):
        if not word.startswith("--") or len(word) == 2:
            values.append(word)
            continue
        if flag is not None:
            found.append(argument(flag, values, start))
        flag, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        start = position
    if flag is not None:
        found.append(argument(flag, values, start))
    return found


def argument(flag: str, values: list[str], position: int) -> Argument:
    """Return what a flag with the words behind it sets."""
    known = flag_spellings().get(flag) or flag_spellings().get(flag.replace("_", "-"))
    if known is None:
        return Argument(flag.replace("-", "_"), _value(values), position, known=False)
    name, stored = known
    return Argument(name, _value(values) if stored is None else stored, position, known=True)


def _value(values: list[str]) -> Any:
    scalars = [plain_scalar(value) for value in values]
    if not scalars:
        return True
    return scalars[0] if len(scalars) == 1 else scalars


def megatron_words(words: Iterable[str]) -> int:
    """Return how many words are flags of Megatron-LM."""
    spellings = flag_spellings()
    return sum(w.startswith("--") and w[2:].partition("=")[0] in spellings for w in words)
