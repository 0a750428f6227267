"""One module per framework: from native fields to an ``EffectiveConfig``.

A resolver has ``FRAMEWORKS`` (whose rules it knows), ``ASSUMED`` (framework -> version taken when
none is known), optionally ``VERSIONS`` (framework -> versions between which its rules differ), and
``resolve(native, version) -> EffectiveConfig``.
"""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

from fsdp_doctor.config.environment import with_environment
from fsdp_doctor.config.versions import key_of, package_of, version_for
from fsdp_doctor.model.config import ConfigValue, EffectiveConfig, NativeConfig

MODULES: dict[str, str] = {
    "torch": "spec",
    "hf-trainer": "hf",
    "llama-factory": "llama_factory",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "gpt-neox": "gpt_neox",
    "lightning": "lightning",
    "axolotl": "axolotl",
    "torchtitan": "torchtitan",
    "torchtune": "torchtune",
    "composer": "composer",
    "verl": "verl",
    "prime-rl": "prime_rl",
    "olmo": "olmo",
}
"""Framework -> module here; others are looked for."""
_WITHOUT_RULES = frozenset({"unknown", "environment", "levanter"})
"""Frameworks that no module here knows."""
_SHOWN_FIELDS = 6


def resolve(native: NativeConfig, version: str | None = None) -> EffectiveConfig:
    """Apply a framework's own rules, of ``version`` or the one that the config tells.

    Where neither is known, the version that the resolver assumes; ``assumed`` says so and which
    fields another version would change. A framework without a resolver has its native fields.
    """
    module = _resolver(native.framework)
    known = version or native.version or version_for(native.framework, {}, native.packages)
    if module is None:
        return with_environment(_flat(native, known), native)
    if known is not None:
        return with_environment(module.resolve(native, known), native)
    assumed = module.ASSUMED.get(native.framework)
    config: EffectiveConfig = module.resolve(native, assumed)
    config = replace(config, assumed=config.assumed or _assumption(module, native, assumed, config))
    return with_environment(config, native)


def frameworks() -> tuple[str, ...]:
    """Return the frameworks that have a resolver."""
    found: list[str] = []
    for name in _names():
        found += getattr(_module(name), "FRAMEWORKS", ())
    return tuple(dict.fromkeys(found))


def assumed_version(framework: str) -> str | None:
    """Return the version whose rules hold when none is known."""
    module = _resolver(framework)
    return None if module is None else module.ASSUMED.get(framework)


def _assumption(
    module: Any, native: NativeConfig, assumed: str | None, config: EffectiveConfig
) -> str | None:
    """Say which version was taken, and what the nearest other one would change."""
    if assumed is None:
        return None
    text = f"version not known: the rules of {package_of(native.framework)} {assumed} hold"
    others = getattr(module, "VERSIONS", {}).get(native.framework, ())
    for other in sorted(others, key=key_of, reverse=True):
        differing = _differing(config, module.resolve(native, other))
        if differing:
            shown = ", ".join(differing[:_SHOWN_FIELDS])
            more = len(differing) - _SHOWN_FIELDS
            more_text = f" and {more} more" if more > 0 else ""
            return f"{text}; {other} would differ in {shown}{more_text}"
    return text


def _differing(a: EffectiveConfig, b: EffectiveConfig) -> list[str]:
    def state(value: ConfigValue | None) -> Any:
        return None if value is None or not value.effective else (value.set, value.value)

    keys = dict.fromkeys((*a.fields, *b.fields))
    return [key for key in keys if state(a.fields.get(key)) != state(b.fields.get(key))]


def _flat(native: NativeConfig, version: str | None) -> EffectiveConfig:
    return EffectiveConfig(
        format=native.format,
        framework=native.framework,
        version=version,
        fields={
            key: ConfigValue(
                set=field.value is not None,
                value=field.value,
                source=field.source,
                native=(key,),
                written=field.value,
            )
            for key, field in native.fields.items()
        },
        resolved=False,
        unknown=native.unknown,
        unresolved=native.unresolved,
    )


def _resolver(framework: str) -> Any:
    if framework in _WITHOUT_RULES:
        return None
    name = MODULES.get(framework)
    if name is not None and name in _names():
        return _module(name)
    stem = framework.replace("-", "_").split("_")[0]
    for candidate in sorted(_names(), key=lambda n: not n.startswith(stem)):
        if candidate in MODULES.values():
            continue
        module = _module(candidate)
        if framework in getattr(module, "FRAMEWORKS", ()):
            return module
    return None


@cache
def _names() -> tuple[str, ...]:
    return tuple(module.name for module in pkgutil.iter_modules(__path__))


def _module(name: str) -> Any:
    return import_module(f"{__name__}.{name}")
