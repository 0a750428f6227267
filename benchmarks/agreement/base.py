"""What the libraries share: a case, and how one is compared."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fsdp_doctor.config.load import Known, load_config

SHARDED = "optim_grads_params"
FSDP1_STRATEGIES: dict[str, tuple[str, bool | None]] = {
    "FULL_SHARD": (SHARDED, True),
    "SHARD_GRAD_OP": (SHARDED, False),
    "NO_SHARD": ("none", None),
    "HYBRID_SHARD": (SHARDED, True),
    "_HYBRID_SHARD_ZERO2": (SHARDED, False),
}
"""Strategy -> what is sharded, and whether it reshards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One config, and what the library makes of it, by our keys."""

    name: str
    config: Mapping[str, Any]
    fmt: str
    theirs: Callable[[], Mapping[str, Any]]
    """None: the library has no such argument, so ours may be absent or None."""
    versions: Mapping[str, str] = field(default_factory=dict)
    part: Mapping[str, Any] | None = None
    """A DeepSpeed config beside it."""
    hidden: int | None = None
    text: str | None = None
    """What the file holds, where it is no YAML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a comparison found."""

    name: str
    compared: tuple[str, ...]
    differing: tuple[tuple[str, Any, Any], ...]
    refused: bool = False
    """The library does not take this config at all."""


def ours(case: Case) -> dict[str, Any]:
    """Return our values of a case, those without effect left out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        text = yaml.safe_dump(dict(case.config)) if case.text is None else case.text
        path.write_text(text, encoding="utf-8")
        name = str(path)
        if case.part is not None:
            part = Path(folder) / "ds.json"
            part.write_text(json.dumps(dict(case.part)), encoding="utf-8")
            name = f"{name}+{part}"
        known = Known(hidden=case.hidden)
        loaded = load_config(name, (), case.fmt, case.versions, known)
    values = loaded.config.fields
    return {key: value.value for key, value in values.items() if value.effective}


def compare(case: Case) -> Outcome:
    """Return how our values of a case differ from the library's."""
    mine = ours(case)
    try:
        theirs = case.theirs()
    except (KeyError, RuntimeError, ValueError):
        return Outcome(name=case.name, compared=(), differing=(), refused=True)
    differing = tuple(
        (key, mine.get(key), value) for key, value in theirs.items() if mine.get(key) != value
    )
    return Outcome(name=case.name, compared=tuple(theirs), differing=differing)


def dtype_name(value: Any) -> str | None:
    """Return torch's name of a dtype without the module."""
    return None if value is None else str(value).removeprefix("torch.")
