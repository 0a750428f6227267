"""A config diff for the terminal."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from fsdp_doctor.model.config import ConfigChange, ConfigDiff, ConfigValue, Effect, EffectiveConfig
from fsdp_doctor.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_COLUMN = 21


def render_diff(
    diff: ConfigDiff,
    name_a: str,
    name_b: str,
    stream: IO[str],
    warnings: Sequence[str] = (),
) -> None:
    """Write ``diff`` to ``stream``: changed, only looks changed, without effect, not known.

    ``name_a``, ``name_b``: what the sides are called. Text from configs is never read as markup.
    """
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, highlight=False, force_terminal=stream.isatty())
    _line(console, f"A  {name_a}{_version(diff.a)}")
    _line(console, f"B  {name_b}{_version(diff.b)}")
    _warnings(console, warnings)
    _changed(console, diff.changed)
    _section(console, "Only looks changed", [_cosmetic(change) for change in diff.cosmetic])
    inert = [(f"{f.key} ({_SIDES[f.side]})", f.reason) for f in diff.inert]
    _section(console, "Written, without effect", inert)
    _unknown(console, diff)
    stream.writelines(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


_SIDES = {"a": "A", "b": "B", "both": "A and B"}


def _version(config: EffectiveConfig) -> str:
    if config.format in ("spec", "run"):
        return f"  ({config.framework} {config.version})" if config.version else ""
    version = f" {config.version}" if config.version else ""
    return f"  ({config.framework}{version}{', assumed' if config.assumed else ''})"


def _warnings(console: Console, warnings: Sequence[str]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    for text in warnings:
        console.print(Padding(Text(clean(f"! {text}"), style="yellow"), (0, 0, 0, 0)))


def _unknown(console: Console, diff: ConfigDiff) -> None:
    """Print changes of unknown effect; keys that only one side has come as one list a side."""
    title = "Changed, effect not known to this tool"
    if diff.a.framework == diff.b.framework:
        _section(console, title, [(c.key, _arrow(c)) for c in diff.unknown])
        return
    both = [c for c in diff.unknown if c.a.set and c.b.set]
    _section(console, title, [(c.key, _arrow(c)) for c in both])
    for side, other in (("a", "b"), ("b", "a")):
        keys = [c.key for c in diff.unknown if getattr(c, side).set and not getattr(c, other).set]
        if keys:
            console.print()
            _line(console, f"Only in {_SIDES[side]}, effect not known ({len(keys)})", "bold")
            _block(console, _wrapped(", ".join(keys), console.width, 2))


def _line(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(clean(text), style=style))


def _changed(console: Console, changes: Sequence[ConfigChange]) -> None:
    from rich.padding import Padding

    console.print()
    if not changes:
        _line(console, "Nothing changed that moves memory or step time.", "bold")
        return
    _line(console, f"Changed ({len(changes)})", "bold")
    for change in changes:
        console.print()
        _line(console, f"  {change.key}: {_arrow(change)}", "bold cyan")
        _line(console, f"  {_natives(change)}", "dim")
        console.print(Padding(_effects_table(change), (0, 0, 0, 4)))


def _effects_table(change: ConfigChange) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(min_width=_COLUMN, no_wrap=True)
    table.add_column(min_width=11, no_wrap=True)
    table.add_column(overflow="fold")
    for row in _rows(change):
        table.add_row(*(Text(clean(cell)) for cell in row))
    return table


def _rows(change: ConfigChange) -> Iterator[tuple[str, str, str]]:
    phases: dict[tuple[str, str, str], list[str]] = {}
    for effect in change.effects:
        known = phases.setdefault((effect.category, _amount(effect), effect.reason), [])
        if effect.phase is not None:
            known.append(effect.phase)
    for (category, amount, reason), names in phases.items():
        yield category, amount, f"{reason} ({', '.join(names)})" if names else reason
    if not change.effects:
        yield "memory", "none", "no device memory changes"
    if change.step_time is not None:
        yield "step time", change.step_time.direction, change.step_time.reason


def _amount(effect: Effect) -> str:
    if effect.bytes is None:
        return effect.direction
    return format_bytes(effect.bytes, signed=True) if effect.bytes else "none"


def _section(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    if not rows:
        return
    console.print()
    _line(console, f"{title} ({len(rows)})", "bold")
    lines: list[str] = []
    for name, text in rows:
        lines += _wrapped(name, console.width, 2)
        lines += _wrapped(text, console.width, 4)
    _block(console, lines)


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    """Return clean lines of at most ``width`` columns; one call of rich for each is slow."""
    space = " " * indent
    return textwrap.wrap(
        clean(text), width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False
    ) or [space]


def _block(console: Console, lines: Sequence[str]) -> None:
    from rich.text import Text

    console.print(Text("\n".join(lines)))


def _cosmetic(change: ConfigChange) -> tuple[str, str]:
    if change.a.value == change.b.value:
        shown = f"{_spelling(change.a)} and {_spelling(change.b)}"
        return change.key, f"{shown}: the same, {show_value(change.a.value)}"
    return change.key, f"{_arrow(change)}: moves neither memory nor step time"


def _spelling(value: ConfigValue) -> str:
    if value.source in ("default", "derived"):
        return "not written"
    return show_value(value.written)


def _arrow(change: ConfigChange) -> str:
    return f"{_shown(change.a)} -> {_shown(change.b)}"


def _shown(value: ConfigValue) -> str:
    text = show_value(value.value) if value.set else "unset"
    return text if value.effective else f"{text} (inert)"


def _natives(change: ConfigChange) -> str:
    names = dict.fromkeys((*change.a.native[:1], *change.b.native[:1]))
    return ", ".join(names)


def show_value(value: Any) -> str:
    """Return a config value as it would stand in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(show_value(item) for item in value)}]"
    return str(value)


def clean(text: str) -> str:
    """Return ``text`` without control characters, which could steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
