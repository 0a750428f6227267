"""Megatron-Core settings under whatever native names a framework gives them.

Rules are written once, in the names of Megatron-LM's arguments; a framework says under which native
key each stands and what its defaults are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fsdp_doctor.config.loaders.megatron_flags import Version
from fsdp_doctor.model.config import ConfigValue, EffectiveConfig, NativeConfig, NativeField

_SAME = object()
_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "bf16_mixed"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half", "16", "16-mixed"), "float16"),
    **dict.fromkeys(("fp32", "float32", "float", "32"), "float32"),
    **dict.fromkeys(("fp8", "float8", "uint8"), "fp8"),
}


class Settings:
    """Settings by name, before and after rules, beside the canonical fields made of them."""

    def __init__(
        self,
        native: NativeConfig,
        version: Version,
        default: Callable[[str], Any],
        paths: Mapping[str, str] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """``version`` is Megatron-Core's. ``paths``: name -> native key, where they differ.

        ``values``: read values of names whose native value means something else.
        """
        self.native = native
        self.version = version
        self.fields: dict[str, ConfigValue] = {}
        self._default = default
        self._paths = dict(paths or {})
        self._names = {path: name for name, path in self._paths.items()}
        self._values = dict(values or {})
        self._forced: dict[str, tuple[Any, str, tuple[str, ...]]] = {}
        self._claimed: set[str] = set()
        self._joined: dict[str, tuple[str, ...]] = {}

    def path(self, name: str) -> str:
        """Return the native key of a name."""
        return self._paths.get(name, name)

    def field(self, name: str) -> NativeField | None:
        """Return the native field of a name, or None where it is not given."""
        return self.native.fields.get(self.path(name))

    def get(self, name: str) -> Any:
        """Return a setting after the rules so far; its default where it is not given."""
        if name in self._forced:
            return self._forced[name][0]
        return self.given(name)

    def given(self, name: str) -> Any:
        """Return a setting as given, or its default."""
        if name in self._values:
            return self._values[name]
        found = self.field(name)
        return self._default(name) if found is None else found.value

    def on(self, name: str) -> bool:
        """Return whether a switch is on."""
        value = self.get(name)
        return value.strip().lower() == "true" if isinstance(value, str) else bool(value)

    def number(self, name: str) -> int | None:
        """Return a whole number, or None where it is not given or not known."""
        value = self.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def dtype(self, name: str) -> str | None:
        """Return a dtype under torch's name; other text as it is."""
        return dtype_name(self.get(name))

    def source(self, name: str) -> str:
        """Return where a setting was written; a dumped value that is the default is that."""
        found = self.field(name)
        if found is None:
            return "default"
        if found.source != "dump":
            return found.source
        return "default" if self.given(name) == self._default(name) else "runtime"

    def is_written(self, name: str) -> bool:
        """Return whether someone wrote a setting."""
        return self.source(name) not in ("default", "runtime")

    def force(self, name: str, value: Any, reason: str, because: Iterable[str] = ()) -> None:
        """Let the framework overwrite a setting; what someone wrote there is without effect."""
        self._forced[name] = (value, reason, tuple(self.path(other) for other in because))
        if self.is_written(name):
            self._inert_native(name, reason)

    def redirect(self, name: str, path: str, value: Any, reason: str) -> None:
        """Let a setting come from native ``path``, as ``value``; its own key is without effect."""
        if self.path(name) != path:
            if self.is_written(name):
                self._inert_native(name, reason)
            self._claimed.add(path)
        self._paths[name] = path
        self._values[name] = value

    def take(
        self,
        key: str,
        name: str,
        value: Any = _SAME,
        *,
        also: Iterable[str] = (),
        reason: str | None = None,
    ) -> None:
        """Set canonical ``key`` from a setting; ``value`` where it is normalised."""
        path = self.path(name)
        self._claimed.add(path)
        source = self.source(name)
        because: tuple[str, ...] = ()
        if name in self._forced:
            forced, why, because = self._forced[name]
            reason = reason or why
            if not self.is_written(name) or self.given(name) != forced:
                source = "derived"
        result = self.get(name) if value is _SAME else value
        found = self.field(name)
        unwritten = source in ("default", "derived")
        natives = (path, *because, *self._natives((name, *also)))
        self.fields[key] = ConfigValue(
            set=result is not None,
            value=result,
            source=source,
            reason=reason,
            native=tuple(dict.fromkeys(natives)),
            written=None if unwritten or found is None else found.value,
        )

    def derive(self, key: str, value: Any, names: Iterable[str], reason: str) -> None:
        """Set ``key`` to what follows from other settings."""
        self.fields[key] = ConfigValue(
            set=value is not None,
            value=value,
            source="derived",
            reason=reason,
            native=tuple(dict.fromkeys(self._natives(tuple(names)))),
        )

    def inert(self, key: str, reason: str) -> None:
        """Mark a canonical field as without effect."""
        self.fields[key] = replace(self.fields[key], effective=False, reason=reason)

    def ignore(self, names: Iterable[str], reason: str) -> None:
        """Mark settings, by their native keys, as without effect where they are given."""
        for name in names:
            self._inert_native(name, reason)

    def ignore_section(self, prefix: str, reason: str) -> None:
        """Mark all native keys under ``prefix`` that no field claimed as without effect."""
        for path in self.native.fields:
            if path.startswith(prefix) and path not in self._claimed:
                self._inert_native(self._names.get(path, path), reason)

    def claim(self, *names: str) -> None:
        """Count settings as told by another field, where one names them."""
        self._claimed.update(map(self.path, names))

    def join(self, name: str, *paths: str) -> None:
        """Let further native keys stand for the same setting."""
        self._joined[name] = (*self._joined.get(name, ()), *paths)
        self._claimed.update(paths)

    def _natives(self, names: tuple[str, ...]) -> list[str]:
        """Return the native keys of settings, with those joined to them."""
        return [p for name in names for p in (self.path(name), *self._joined.get(name, ()))]

    def _inert_native(self, name: str, reason: str) -> None:
        path, found = self.path(name), self.field(name)
        shared = sum(other == path for other in self._paths.values()) > 1
        if found is not None and path not in self.fields and not shared:
            self.fields[path] = native_value(path, found, self.source(name), reason)

    def finish(self, version: str | None) -> EffectiveConfig:
        """Return the effective config; settings without a canonical key keep their own."""
        self._drop_doubled()
        named = {path for field in self.fields.values() for path in field.native}
        for path, found in self.native.fields.items():
            if path in named or path in self.fields:
                continue
            source = self.source(self._names.get(path, path))
            self.fields[path] = native_value(path, found, source, None)
        return EffectiveConfig(
            format=self.native.format,
            framework=self.native.framework,
            version=version,
            fields=dict(self.fields),
            unknown=self.native.unknown,
            unresolved=self.native.unresolved,
        )

    def _drop_doubled(self) -> None:
        """Let a canonical field without effect stand for the native key that it came from."""
        for key, field in list(self.fields.items()):
            path = field.native[0] if field.native else key
            if not field.effective and path != key and path in self.fields:
                del self.fields[path]


def native_value(path: str, found: NativeField, source: str, reason: str | None) -> ConfigValue:
    """Return a native field as it is; with a reason, as one without effect."""
    return ConfigValue(
        set=found.value is not None,
        value=found.value,
        source=source,
        effective=reason is None,
        reason=reason,
        native=(path,),
        written=None if source == "default" else found.value,
    )


def dtype_name(value: Any) -> str | None:
    """Return torch's name of a dtype given in any spelling; other text as it is."""
    if value is None:
        return None
    text = str(value).removeprefix("torch.").strip().lower()
    return _DTYPES.get(text, text)
