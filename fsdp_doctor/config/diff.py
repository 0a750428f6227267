"""Compare two effective configs: what really changed, what only looks changed, what is inert.

A field that differs is a change when someone wrote the difference. One that differs only because
another field does (shards follow the world size, dtypes follow the stored one) belongs to that
change, so that one flag is one change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fsdp_doctor.config.diff_context import contexts, natives_of
from fsdp_doctor.config.effects import (
    effects_of,
    has_no_effect,
    is_known,
    step_time_of,
)
from fsdp_doctor.config.neutral import NEUTRAL, is_neutral
from fsdp_doctor.model.config import (
    ConfigChange,
    ConfigDiff,
    ConfigValue,
    EffectiveConfig,
    InertField,
)
from fsdp_doctor.model.run import ModelSizes

_ABSENT = ConfigValue(set=False, source="default", reason="not a field of this engine")
_GOVERNORS = dict.fromkeys(
    (
        "recompute.granularity",
        "recompute.memory_budget",
        "recompute.reentrant",
        "recompute.modules",
    ),
    "recompute.mode",
)
"""Field -> field that says whether it acts."""
_LAUNCHERS = ("megatron", "bridge")
"""Formats that hold a job's environment beside its arguments."""
_TOLD = frozenset({"model", "batch", "world", "optimizer", "ckpt", "init", "name", "seed", "steps"})
"""Groups of fields that some frameworks' configs leave to the script."""
_WRITTEN = frozenset({"file", "cli", "env"})


def diff_configs(
    a: EffectiveConfig,
    b: EffectiveConfig,
    sizes_a: ModelSizes | None = None,
    sizes_b: ModelSizes | None = None,
) -> ConfigDiff:
    """Return the difference from ``a`` to ``b``, each change with its effects.

    ``sizes_a``, ``sizes_b``: of the trained models; effects have bytes where they, or the shape of
    the built-in GPT, are known.
    """
    pairs = [
        (key, a.fields.get(key, _ABSENT), b.fields.get(key, _ABSENT))
        for key in dict.fromkeys((*a.fields, *b.fields))
        if _is_compared(key, a, b)
    ]
    differing = [ConfigChange(key=key, a=x, b=y) for key, x, y in pairs if _differ(key, x, y)]
    causes = _causes(differing)
    changed, cosmetic, unknown = [], [], []
    for change, context in contexts(causes, differing, (a, b), (sizes_a, sizes_b)):
        if has_no_effect(change, context):
            cosmetic.append(change)
        elif not is_known(change.key):
            unknown.append(change)
        else:
            changed.append(
                replace(
                    change,
                    effects=effects_of(change, context),
                    step_time=step_time_of(change, context),
                )
            )
    explained = {native for change in causes for native in natives_of(change)}
    return ConfigDiff(
        a=a,
        b=b,
        changed=tuple(changed),
        cosmetic=(*cosmetic, *_spelt_differently(pairs, explained)),
        inert=_inert(pairs),
        unknown=tuple(unknown),
    )


def same_value(a: Any, b: Any) -> bool:
    """Return whether two field values are equal; ``1`` and ``true`` are not.

    Two containers are compared by deepdiff, numbers in them by value.
    """
    if isinstance(a, (list, tuple, dict)) and isinstance(b, (list, tuple, dict)) and a != b:
        from deepdiff import DeepDiff

        return not DeepDiff(a, b, ignore_numeric_type_changes=True)
    return bool(a is b or a == b) and isinstance(a, bool) == isinstance(b, bool)


def _is_compared(key: str, a: EffectiveConfig, b: EffectiveConfig) -> bool:
    """Return whether a key counts: variables and packages only where both sides carry some.

    Across frameworks a model or a batch that one side does not tell is not another one.
    """
    prefix = key.partition(".")[0]
    if prefix in _TOLD and a.framework != b.framework:
        return key in NEUTRAL or (key in a.fields and key in b.fields)
    if prefix not in ("env", "packages"):
        return True
    return all(_carries(prefix, side) for side in (a, b))


def _carries(prefix: str, side: EffectiveConfig) -> bool:
    """Return whether a side tells about its environment; a launch script does, saying nothing."""
    launches = prefix == "env" and side.format.startswith(_LAUNCHERS)
    return launches or any(key.startswith(f"{prefix}.") for key in side.fields)


def _differ(key: str, x: ConfigValue, y: ConfigValue) -> bool:
    """Return whether two sides come to something else; one that does not act is as good as none."""
    if not (_acts(x) or _acts(y)):
        return False
    values = [v.value if v is _ABSENT or v.effective else NEUTRAL.get(key, v.value) for v in (x, y)]
    return not same_value(*values)


def _acts(value: ConfigValue) -> bool:
    return value is not _ABSENT and value.effective


def _written_state(value: ConfigValue) -> tuple[bool, Any]:
    return value.source in _WRITTEN, value.written


def _causes(differing: Sequence[ConfigChange]) -> list[ConfigChange]:
    """Return the changes that are not the consequence of another one."""
    keys = {change.key for change in differing}
    independent = []
    derived = []
    for change in differing:
        if _is_moot(change, keys):
            continue
        if _ABSENT in (change.a, change.b) and _is_nothing(change):
            continue
        if change.a.source == change.b.source == "derived" or _follows(change):
            derived.append(change)
        else:
            independent.append(change)
    written = [c for c in independent if _written_state(c.a) != _written_state(c.b)]
    claimed = {native for change in written for native in natives_of(change)}
    caused = bool(written)
    for change in (*independent, *derived):
        if change in written or claimed & natives_of(change):
            continue
        if not (caused and _follows(change)):
            written.append(change)
    order = {change.key: position for position, change in enumerate(differing)}
    return sorted(written, key=lambda change: order[change.key])


def _is_moot(change: ConfigChange, keys: set[str]) -> bool:
    """Return whether a field acts on one side only because the field that governs it changed."""
    governed = _GOVERNORS.get(change.key) in keys
    return governed and change.a.effective != change.b.effective


def _is_nothing(change: ConfigChange) -> bool:
    """Return whether a field of one side is as good as the other side's lack of it."""
    present = change.b if change.a is _ABSENT else change.a
    return not present.effective or is_neutral(change.key, present.value)


def _follows(change: ConfigChange) -> bool:
    """Return whether a field is there only because another one was changed."""
    sides = (change.a, change.b)
    return _ABSENT in sides and all(side.source not in _WRITTEN for side in sides)


def _spelt_differently(
    pairs: Sequence[tuple[str, ConfigValue, ConfigValue]], explained: set[str]
) -> list[ConfigChange]:
    """Return fields that were written differently and come to the same."""
    found = []
    for key, x, y in pairs:
        if _ABSENT in (x, y) or not same_value(x.value, y.value):
            continue
        if not (x.effective or y.effective) or explained & {*x.native[:1], *y.native[:1]}:
            continue
        if not _same_written(x, y):
            found.append(ConfigChange(key=key, a=x, b=y))
    return found


def _same_written(x: ConfigValue, y: ConfigValue) -> bool:
    (written_x, value_x), (written_y, value_y) = _written_state(x), _written_state(y)
    return written_x == written_y and same_value(value_x, value_y)


def _inert(pairs: Sequence[tuple[str, ConfigValue, ConfigValue]]) -> tuple[InertField, ...]:
    """Return the fields that are written and do nothing, each with the side it is on."""
    found = []
    for key, x, y in pairs:
        sides = [v for v in (x, y) if not v.effective and v.source in _WRITTEN]
        if len(sides) == 2 and x.reason == y.reason:
            found.append(InertField(key=key, side="both", reason=x.reason or ""))
            continue
        for value in sides:
            found.append(  # noqa: PERF401 (two sides, two reasons)
                InertField(key=key, side="a" if value is x else "b", reason=value.reason or "")
            )
    return tuple(found)
