"""Take out of a report for others what is nobody's business: paths, hosts, addresses, secrets."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from fsdp_doctor.postmortem import PostMortem
from fsdp_doctor.report.private_text import without_names, without_secrets

MAX_TEXT = 600
_Part = TypeVar("_Part")
_KEPT = frozenset({"tone", "kind", "only", "color", "title_tone"})
"""Fields that steer the layout; they hold no text of a job."""


class Cleaner:
    """Cleans text: always of secrets, ``for_others`` also of paths, hosts and addresses."""

    def __init__(self, result: PostMortem, *, for_others: bool) -> None:
        self._for_others = for_others
        names = {f.host for f in result.triage.failures if f.host and len(f.host) > 2}
        self._hosts = {
            host: f"host-{number}"
            for number, host in enumerate(sorted(names, key=lambda name: (-len(name), name)), 1)
        }

    def text(self, text: str) -> str:
        """Return a text that may be shown."""
        text = without_secrets(text[: 4 * MAX_TEXT])
        if self._for_others:
            for host, alias in self._hosts.items():
                text = text.replace(host, alias)
            text = without_names(text)
        return text[:MAX_TEXT]

    def host(self, host: str | None) -> str | None:
        """Return a host's name, or an alias for it."""
        if host is None or not self._for_others:
            return host
        return self._hosts.get(host, "host")

    def place(self, file: str | None, line: int | None) -> str:
        """Return a place in a log."""
        if file is None:
            return ""
        name = self.text(file)
        return f"{name}:{line}" if line is not None else name


def cleaned(part: _Part, cleaner: Cleaner) -> _Part:
    """Return a document, or a part of one, with all its text cleaned."""
    if not is_dataclass(part) or isinstance(part, type):
        return part
    changes = {
        field.name: _clean_value(getattr(part, field.name), cleaner)
        for field in fields(part)
        if field.name not in _KEPT
    }
    return replace(part, **changes)


def _clean_value(value: Any, cleaner: Cleaner) -> Any:
    if isinstance(value, str):
        return "\n".join(cleaner.text(line) for line in value.split("\n"))
    if isinstance(value, tuple):
        return tuple(_clean_value(item, cleaner) for item in value)
    return cleaned(value, cleaner)
