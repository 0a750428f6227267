"""Collects the fields of an effective config while a resolver decides on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdp_doctor.model.config import ConfigValue

_SAME = object()


class Fields:
    """Canonical fields under construction, beside the native values they come from."""

    def __init__(self, native: Mapping[str, Any], written: Mapping[str, str]) -> None:
        self._native = native
        self._written = written
        self.values: dict[str, ConfigValue] = {}

    def native(self, path: str) -> Any:
        """Return a native value; None for a key of a section that is null."""
        return self._native.get(path)

    def take(
        self,
        key: str,
        path: str,
        value: Any = _SAME,
        *,
        also: tuple[str, ...] = (),
        reason: str | None = None,
    ) -> None:
        """Set ``key`` from native ``path``; ``value`` when it is normalised, else as it is.

        ``also`` names further native keys that the value depends on. A None that is not written
        leaves the field unset.
        """
        present = path in self._native
        result = self.native(path) if value is _SAME else value
        source = self._source(path)
        self.values[key] = ConfigValue(
            set=result is not None,
            value=result,
            source=source,
            reason=reason,
            native=tuple(dict.fromkeys((path, *also))),
            written=None if source == "default" else self.native(path) if present else result,
        )

    def _source(self, path: str) -> str:
        """Return where a key was written: itself, as the null section around it, or as a section
        with keys of its own.
        """
        section = path.rpartition(".")[0]
        if path not in self._written and self._native.get(section, _SAME) is None:
            path = section
        children = (s for p, s in self._written.items() if p.startswith(f"{path}."))
        return self._written.get(path) or next(children, "default")

    def derive(self, key: str, value: Any, natives: tuple[str, ...], reason: str) -> None:
        """Set ``key`` to a value that follows from other native keys."""
        self.values[key] = ConfigValue(
            set=value is not None, value=value, source="derived", reason=reason, native=natives
        )

    def inert(self, key: str, reason: str) -> None:
        """Mark a field as without effect."""
        self.values[key] = replace(self.values[key], effective=False, reason=reason)

    def inert_section(self, prefix: str, reason: str) -> None:
        """Add the written keys under ``prefix`` by their native names, without effect."""
        for path, source in self._written.items():
            holds_others = any(other.startswith(f"{path}.") for other in self._written)
            if path.startswith(prefix) and not holds_others:
                self.values[path] = ConfigValue(
                    set=True,
                    value=self.native(path),
                    source=source,
                    effective=False,
                    reason=reason,
                    native=(path,),
                    written=self.native(path),
                )
