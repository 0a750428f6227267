"""A config diff in the words of the JSON contract."""

from __future__ import annotations

from typing import Any

from fsdp_doctor.model.config import ConfigChange, ConfigDiff, ConfigValue, EffectiveConfig


def diff_payload(diff: ConfigDiff) -> dict[str, Any]:
    """Return ``a``, ``b``, ``changed``, ``cosmetic``, ``inert``, ``unknown``."""
    return {
        "a": _side(diff.a),
        "b": _side(diff.b),
        "changed": [change_payload(change) for change in diff.changed],
        "cosmetic": [change_payload(change) for change in diff.cosmetic],
        "inert": list(diff.inert),
        "unknown": [change_payload(change) for change in diff.unknown],
    }


def change_payload(change: ConfigChange) -> dict[str, Any]:
    """Return one changed field; bytes are integers or null."""
    return {
        "key": change.key,
        "a": value_payload(change.a),
        "b": value_payload(change.b),
        "native": {"a": list(change.a.native), "b": list(change.b.native)},
        "effects": list(change.effects),
        "step_time": change.step_time,
    }


def value_payload(value: ConfigValue) -> dict[str, Any]:
    """Return a field's value with its source; ``written`` is the native spelling."""
    return {
        "set": value.set,
        "value": value.value,
        "source": value.source,
        "effective": value.effective,
        "reason": value.reason,
        "written": value.written,
    }


def _side(config: EffectiveConfig) -> dict[str, Any]:
    return {
        "format": config.format,
        "framework": config.framework,
        "version": config.version,
        "resolved": config.resolved,
        "assumed": config.assumed,
        "unknown": list(config.unknown),
        "unresolved": list(config.unresolved),
    }


def diff_warnings(a: EffectiveConfig, b: EffectiveConfig) -> list[str]:
    """Return what a reader of the comparison must know: assumed versions, missing rules."""
    found = []
    for name, config in (("A", a), ("B", b)):
        if not config.resolved:
            what = config.framework if config.framework != "unknown" else "this framework"
            found.append(f"{name}: no rules of {what} are known here: keys are compared as written")
        if config.assumed:
            found.append(f"{name}: {config.assumed}")
        found += [f"{name}: not resolved: {text}" for text in config.unresolved[:5]]
    if a.framework != b.framework:
        found.append(f"A is for {a.framework}, B for {b.framework}: only shared fields compare")
    return found
