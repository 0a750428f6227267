"""The fields before and after each change of a comparison, one change upon the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fsdp_doctor.config.effects import EffectContext
from fsdp_doctor.config.neutral import NEUTRAL
from fsdp_doctor.model.config import ConfigChange, ConfigValue, EffectiveConfig
from fsdp_doctor.model.run import ModelSizes


def natives_of(change: ConfigChange) -> set[str]:
    """Return the native keys of both sides."""
    return {*change.a.native, *change.b.native}


def contexts(
    causes: Sequence[ConfigChange],
    differing: Sequence[ConfigChange],
    sides: tuple[EffectiveConfig, EffectiveConfig],
    sizes: tuple[ModelSizes | None, ModelSizes | None],
) -> Iterator[tuple[ConfigChange, EffectContext]]:
    """Yield each change with the fields before and after it, one change upon the other.

    The engine and its strategy are one written key: its bytes belong to ``sharding.strategy``.
    """
    a, b = sides
    before, size = dict(a.fields), sizes[0]
    keys = {change.key for change in causes}
    for change in causes:
        after = _with_change(before, change, differing, b.fields, keys)
        resized = change.key.startswith(("model.", "sharding."))
        context = EffectContext(
            a=a,
            b=b,
            before=before,
            after=after,
            sizes_before=size,
            sizes_after=sizes[1] if resized else size,
        )
        yield change, context
        if change.key != "sharding.impl" or "sharding.strategy" not in keys:
            before, size = after, context.sizes_after


def _with_change(
    before: Mapping[str, ConfigValue],
    change: ConfigChange,
    differing: Sequence[ConfigChange],
    b: Mapping[str, ConfigValue],
    causes: set[str],
) -> dict[str, ConfigValue]:
    """Return ``before`` with ``change``, and what follows from it, taken from B."""
    natives = natives_of(change)
    follows = {change.key} | {
        other.key
        for other in differing
        if natives & natives_of(other) and (other.key not in causes or _same_key(change, other))
    }
    after = {key: value for key, value in before.items() if key not in follows}
    after |= {key: b[key] for key in follows if key in b}
    switched = "config.strategy" in (*change.a.native[:1], *change.b.native[:1])
    if not switched and change.key != "sharding.impl":
        return after
    after = {key: value for key, value in after.items() if key in b}
    for key, value in b.items():
        if key not in after:
            default = NEUTRAL.get(key) if key in causes else None
            after[key] = value if default is None else replace(value, value=default)
    return after


def _same_key(change: ConfigChange, other: ConfigChange) -> bool:
    return change.a.native[:1] == other.a.native[:1] and change.b.native[:1] == other.b.native[:1]
