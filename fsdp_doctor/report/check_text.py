"""What ``check`` found, for the terminal and as the JSON contract's keys."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from fsdp_doctor.config.rules.engine import Undecided
from fsdp_doctor.config.rules.files import CheckedConfig
from fsdp_doctor.model.config import Violation
from fsdp_doctor.redact import redact_text
from fsdp_doctor.report.diff_text import show_value
from fsdp_doctor.report.lines import line, listed, wrapped

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold"}
_FIELDS = 6
_LONGEST = 120
_OPTIONS = {"gpu": "--gpu", "world_size": "--world-size"}


def check_payload(checked: CheckedConfig) -> dict[str, Any]:
    """Return ``violations`` and, beside the contract, what is known about the config."""
    return {
        "format": checked.format,
        "framework": checked.framework,
        "version": checked.version,
        "assumed": checked.assumed,
        "checked": checked.result.checked,
        "violations": list(checked.result.violations),
        "undecided": list(checked.result.undecided),
        "unknown": list(checked.unknown),
        "unresolved": [redact_text(text) for text in checked.unresolved],
    }


def render_check(checked: CheckedConfig, name: str, stream: IO[str]) -> None:
    """Write what was found to ``stream``, errors first. Text of configs is never read as markup."""
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, highlight=False, force_terminal=stream.isatty())
    version = f" {checked.version}" if checked.version else ""
    line(console, f"{name}  ({checked.framework}{version}, format {checked.format})")
    if checked.assumed:
        wrapped(console, checked.assumed, 2)
    console.print()
    line(console, _summary(checked), "bold")
    for violation in checked.result.violations:
        _violation(console, violation)
    _undecided(console, checked.result.undecided)
    listed(console, "Keys that this tool does not know", checked.unknown)
    listed(console, "Not known without running something", checked.unresolved)
    stream.writelines(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def _summary(checked: CheckedConfig) -> str:
    rules = f"{checked.result.checked} rules"
    if checked.result.checked == 0:
        return f"There are no rules for {checked.framework}."
    counts = Counter(str(violation.severity) for violation in checked.result.violations)
    if not counts:
        return f"Nothing found by {rules}."
    parts = [
        f"{counts[severity]} {severity}{'' if counts[severity] == 1 else 's'}"
        for severity in _STYLES
        if counts[severity]
    ]
    return f"{', '.join(parts)} ({rules} checked)"


def _violation(console: Console, violation: Violation) -> None:
    place = redact_text(violation.file or "")
    if violation.line is not None:
        place = f"{place}:{violation.line}"
    console.print()
    title = f"{violation.severity}  {violation.rule}"
    line(console, f"{title}  {place}" if place else title, _STYLES[violation.severity])
    for key in violation.fields[:_FIELDS]:
        value = violation.values.get(key)
        wrapped(console, f"{key}: {'not written' if value is None else _short(value)}", 4)
    if len(violation.fields) > _FIELDS:
        wrapped(console, f"... and {len(violation.fields) - _FIELDS} more", 4)
    wrapped(console, violation.message, 2)
    wrapped(console, f"Fix: {violation.fix}", 2)
    versions = "" if violation.versions == "all" else f"versions {violation.versions}; "
    wrapped(console, f"({versions}source: {violation.source})", 2, "dim")


def _short(value: Any) -> str:
    text = show_value(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _undecided(console: Console, undecided: Sequence[Undecided]) -> None:
    if not undecided:
        return
    by_need: dict[tuple[str, ...], list[str]] = {}
    for entry in undecided:
        by_need.setdefault(entry.needs, []).append(entry.rule)
    console.print()
    line(console, f"Not decided ({len(undecided)})", "bold")
    for needs, rules in by_need.items():
        wanted = " and ".join(
            _OPTIONS.get(need, f"--framework-version {need}=...") for need in needs
        )
        wrapped(console, f"{', '.join(rules)}: give {wanted}", 2)
