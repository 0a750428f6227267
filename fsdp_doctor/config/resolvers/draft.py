"""An effective config under construction from native fields.

Every native key ends up somewhere: in a canonical field, as a native field without effect, or, left
over, as a native field whose effect is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from fsdp_doctor.model.config import ConfigValue, EffectiveConfig, NativeConfig, NativeField

Convert = Callable[[Any], Any]

HIDDEN = "@hidden"
"""Native key of the model's hidden size where the user gave it; keys with ``@`` are no fields."""


def same(value: Any) -> Any:
    """Return ``value``."""
    return value


class Draft:
    """Canonical fields beside the native ones they come from."""

    def __init__(self, native: NativeConfig, version: str | None) -> None:
        self.native = native
        self.version = version
        self.fields: dict[str, NativeField] = dict(native.fields)
        self.values: dict[str, ConfigValue] = {}
        self.notes: list[str] = []
        self._claimed: set[str] = set()

    def find(self, *keys: str) -> str | None:
        """Return the first of ``keys`` that is written, and claim them all."""
        self._claimed.update(keys)
        return next((key for key in keys if key in self.fields), None)

    def raw(self, *keys: str, default: Any = None) -> Any:
        """Return the first written value of ``keys`` that is not null."""
        self._claimed.update(keys)
        for key in keys:
            field = self.fields.get(key)
            if field is not None and field.value is not None:
                return field.value
        return default

    def has(self, *keys: str) -> bool:
        """Return whether one of ``keys`` is written and not null."""
        return self.raw(*keys) is not None

    def section(self, prefix: str) -> dict[str, Any]:
        """Return the written values under ``prefix`` (``fsdp_config.``); claims none."""
        return {
            key.removeprefix(prefix): field.value
            for key, field in self.fields.items()
            if key.startswith(prefix)
        }

    def take(
        self,
        key: str,
        natives: str | tuple[str, ...],
        default: Any = None,
        convert: Convert = same,
        *,
        also: tuple[str, ...] = (),
        reason: str | None = None,
    ) -> Any:
        """Set ``key`` from the first written of ``natives`` (null: ``default``); return its value.

        ``also`` names further native keys that the value depends on. ``reason`` is kept where the
        default holds.
        """
        names = (natives,) if isinstance(natives, str) else natives
        found = self.find(*names)
        raw = None if found is None else self.fields[found].value
        value = default if raw is None else convert(raw)
        self.values[key] = ConfigValue(
            set=value is not None,
            value=value,
            source="default" if found is None else self.fields[found].source,
            reason=reason if raw is None else None,
            native=tuple(dict.fromkeys((found or names[0], *also))),
            written=raw,
        )
        return value

    def put(
        self, key: str, value: Any, natives: str | tuple[str, ...], reason: str | None = None
    ) -> None:
        """Set ``key`` to a value worked out from ``natives``; it counts as written where one is."""
        names = (natives,) if isinstance(natives, str) else natives
        found = self.find(*names)
        first = names[:1] if found is None else (found,)
        self.values[key] = ConfigValue(
            set=value is not None,
            value=value,
            source="default" if found is None else self.fields[found].source,
            reason=reason,
            native=tuple(dict.fromkeys((*first, *names))),
            written=None if found is None else self.fields[found].value,
        )

    def derive(self, key: str, value: Any, natives: tuple[str, ...], reason: str) -> None:
        """Set ``key`` to what follows from others: it is no change of its own."""
        self.values[key] = ConfigValue(
            set=value is not None, value=value, source="derived", reason=reason, native=natives
        )

    def inert(self, key: str, reason: str) -> None:
        """Mark a canonical field as without effect."""
        if key in self.values:
            self.values[key] = replace(self.values[key], effective=False, reason=reason)

    def drop(self, natives: Iterable[str], reason: str) -> None:
        """Add written native keys under their own names, without effect."""
        for name in natives:
            field = self.fields.get(name)
            self._claimed.add(name)
            if field is not None:
                self.values[name] = _own(name, field, reason)

    def drop_section(self, prefix: str, reason: str) -> None:
        """Add all native keys under ``prefix`` that are left, without effect."""
        left = [k for k in self.fields if k.startswith(prefix) and k not in self._claimed]
        self.drop(left, reason)

    def claim(self, *natives: str) -> None:
        """Count keys as spoken for: another field tells what they do."""
        self._claimed.update(natives)

    def finish(self, unknown_reason: str = "not a key of this framework") -> EffectiveConfig:
        """Return the effective config; native keys that are left over are fields of that name."""
        unknown = set(self.native.unknown)
        values = dict(self.values)
        for name, field in self.fields.items():
            if name in self._claimed or name in values or name.startswith("@"):
                continue
            values[name] = _own(name, field, unknown_reason if name in unknown else None)
        return EffectiveConfig(
            format=self.native.format,
            framework=self.native.framework,
            version=self.version,
            fields=values,
            unknown=self.native.unknown,
            unresolved=(*self.native.unresolved, *self.notes),
        )


def _own(name: str, field: NativeField, reason: str | None) -> ConfigValue:
    return ConfigValue(
        set=field.value is not None,
        value=field.value,
        source=field.source,
        effective=reason is None,
        reason=reason,
        native=(name,),
        written=field.value,
    )
