"""An effective config, for the terminal and as the JSON contract's keys."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any

from fsdp_doctor.config.diff_payload import value_payload
from fsdp_doctor.model.config import ConfigValue, EffectiveConfig
from fsdp_doctor.redact import redact, redact_text
from fsdp_doctor.report.diff_text import show_value
from fsdp_doctor.report.lines import line, listed, wrapped

if TYPE_CHECKING:
    from rich.console import Console

_LONGEST = 200
_NAME = 32
_VALUE = 22
_OTHER = "other"


def show_payload(config: EffectiveConfig) -> dict[str, Any]:
    """Return ``fields`` and, beside the contract, what is known about the config."""
    return {
        "format": config.format,
        "framework": config.framework,
        "version": config.version,
        "assumed": config.assumed,
        "resolved": config.resolved,
        "fields": {key: _payload(key, value) for key, value in config.fields.items()},
        "unknown": list(config.unknown),
        "unresolved": [redact_text(text) for text in config.unresolved],
    }


def _payload(key: str, value: ConfigValue) -> dict[str, Any]:
    payload = value_payload(value)
    name = value.native[0] if value.native else key
    payload["value"] = redact(redact(value.value, name), key)
    payload["written"] = redact(redact(value.written, name), key)
    return payload | {"native": list(value.native)}


def render_show(config: EffectiveConfig, name: str, stream: IO[str]) -> None:
    """Write the config to ``stream``, by area. Text of configs is never read as markup."""
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, highlight=False, force_terminal=stream.isatty())
    version = f" {config.version}" if config.version else ""
    line(console, f"{name}  ({config.framework}{version}, format {config.format})")
    if config.assumed:
        wrapped(console, config.assumed, 2)
    if not config.resolved:
        wrapped(console, "The rules of this framework are not known: keys are as written.", 2)
    acting = {key: value for key, value in config.fields.items() if value.effective}
    for area, keys in _areas(acting if config.resolved else config.fields):
        console.print()
        line(console, area, "bold")
        for key in keys:
            _field(console, key, config.fields[key], area)
    inert = [key for key, value in config.fields.items() if not value.effective]
    _inert(console, config, inert if config.resolved else [])
    listed(console, "Keys that this tool does not know", config.unknown)
    listed(console, "Not known without running something", config.unresolved)
    stream.writelines(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def _areas(fields: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Return the keys by their first part, those without a second part last."""
    areas: dict[str, list[str]] = {}
    for key in fields:
        area, dot, _ = key.partition(".")
        areas.setdefault(area if dot else _OTHER, []).append(key)
    return sorted(areas.items(), key=lambda area: area[0] == _OTHER)


def _field(console: Console, key: str, value: ConfigValue, area: str) -> None:
    """Write one field: name, value and source, and below it where the value comes from."""
    name = key.removeprefix(f"{area}.")
    wrapped(console, f"{name:<{_NAME}} {_shown(key, value):<{_VALUE}} {value.source}", 2)
    native = value.native[0] if value.native and value.native[0] != key else ""
    reason = redact_text(value.reason or "")
    below = ": ".join(part for part in (native, reason) if part)
    if below:
        wrapped(console, below, 6, "dim")


def _shown(key: str, value: ConfigValue) -> str:
    if not value.set:
        return "unset"
    text = show_value(redact(redact(value.value, value.native[0] if value.native else key), key))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _inert(console: Console, config: EffectiveConfig, keys: Sequence[str]) -> None:
    written = [key for key in keys if config.fields[key].source not in ("default", "derived")]
    if not written:
        return
    console.print()
    line(console, f"Written, without effect ({len(written)})", "bold")
    for key in written:
        value = config.fields[key]
        natives = ", ".join(name for name in value.native[:1] if name != key)
        place = f"  ({natives})" if natives else ""
        wrapped(console, f"{key}: {_shown(key, value)}{place}", 2)
        wrapped(console, redact_text(value.reason or ""), 4)
