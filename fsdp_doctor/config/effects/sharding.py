"""Engine, strategy, resharding, group sizes and wrap units."""

from __future__ import annotations

from fsdp_doctor.config.effects.base import (
    DDP,
    FSDP1,
    FSDP2,
    GUESS,
    ZERO,
    EffectContext,
    EffectRule,
    computed,
    effect,
    rises,
)
from fsdp_doctor.config.effects.formulas import is_sharded, post_forward_shard_bytes
from fsdp_doctor.config.effects.reported import frozen_copies
from fsdp_doctor.model.config import ConfigChange, Direction, Effect
from fsdp_doctor.model.memory import Category, Phase


def _engine(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    """Buffers and scratch of the engine itself; what is divided is ``sharding.strategy``'s."""
    source = f"{DDP}; {FSDP1}; {FSDP2}"
    found = [
        _engine_communication(change, context, source),
        effect(
            Category.TEMPORARIES,
            "either",
            "flat parameters (FSDP1), single ones (FSDP2, DDP) need other scratch",
        ),
    ]
    if "ddp" not in (change.a.value, change.b.value):
        why = "FSDP1 gathers into one flat parameter, FSDP2 copies out of its gather buffer"
        found.append(effect(Category.UNSHARDED_PARAMETERS, "either", why, source))
        why = "FSDP1 holds a flat gradient per unit, FSDP2 one per parameter"
        found.append(effect(Category.UNSHARDED_GRADIENTS, "either", why, source))
        why = "FSDP1 pads each unit's flat parameter, FSDP2 each parameter"
        states = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
        found += [effect(category, "either", why, source) for category in states]
    return (*found, *frozen_copies(change, context))


def _engine_communication(change: ConfigChange, context: EffectContext, source: str) -> Effect:
    if "ddp" not in (change.a.value, change.b.value):
        return effect(Category.COMMUNICATION, "either", "other gather and reduce buffers", source)
    leaves = change.a.value == "ddp"
    fields = context.a.fields if leaves else context.b.fields
    view = fields.get("comm.bucket_view")
    if view is not None and view.value:
        why = "DDP's buckets hold the gradients; FSDP has buffers of one or two units"
        return effect(Category.COMMUNICATION, "either", why, source)
    why = "DDP keeps one full copy of the gradients in buckets; FSDP has buffers of a unit or two"
    return effect(Category.COMMUNICATION, "down" if leaves else "up", why, source)


_SHARDED_STATES = (
    (Category.PARAMETERS, "parameters are kept as 1/N"),
    (Category.GRADIENTS, "gradients are kept as 1/N after reduction"),
    (Category.OPTIMIZER_STATE, "the optimizer steps on 1/N"),
)


def _states(context: EffectContext, fallback: Direction) -> list[Effect]:
    found = [computed(context, c, fallback, why, ZERO) for c, why in _SHARDED_STATES]
    why = "scratch of the optimizer step is as large as the shard"
    found.append(
        computed(context, Category.TEMPORARIES, fallback, why, ZERO, phase=Phase.OPTIMIZER)
    )
    return found


def _strategy(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    shards = is_sharded(context.after)
    fallback: Direction = "down" if shards else "up"
    gathered: Direction = "up" if shards else "down"
    found = _states(context, fallback)
    why = "units are gathered for compute, at least one at a time"
    found.append(
        computed(context, Category.UNSHARDED_PARAMETERS, gathered, why, FSDP2, zero_is_open=True)
    )
    why = "a unit's whole gradient lives until it is reduced"
    found.append(
        computed(context, Category.UNSHARDED_GRADIENTS, gathered, why, FSDP2, zero_is_open=True)
    )
    if change.a.native[:1] != ("config.strategy",):
        why = "gather and reduce buffers of a unit or two"
        found.append(effect(Category.COMMUNICATION, gathered, why, FSDP1))
    return tuple(found)


def _kept_share(change: ConfigChange) -> float:
    """Return how much less B keeps gathered after forward than A, as a share of the parameters.

    An engine without the field counts as the default, true.
    """
    kept = []
    for field in (change.a, change.b):
        value = field.value if field.set else True
        kept.append(1.0 - value if isinstance(value, bool) else 1.0 / value)
    return kept[0] - kept[1]


def _reshard(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    both = change.a.set and change.b.set
    more = _kept_share(change) < 0
    whose = "the root stays" if change.key.endswith("[root]") else "units stay"
    why = (
        f"{whose} gathered between forward and backward, in the computed dtype"
        if more
        else "gathered parameters are freed after forward and gathered again in backward"
    )
    return (
        computed(
            context,
            Category.UNSHARDED_PARAMETERS,
            "up" if more else "down",
            why,
            f"{FSDP1}; {FSDP2}",
            zero_is_open=not both,
        ),
        effect(
            Category.COMMUNICATION,
            "either",
            "without a gather in backward there is no buffer for the next unit",
            FSDP2,
        ),
        *_post_forward_shards(context),
    )


def _post_forward_shards(context: EffectContext) -> list[Effect]:
    """Return the effects of resharding to n ranks instead of all."""
    before = post_forward_shard_bytes(context.before, context.sizes_before)
    after = post_forward_shard_bytes(context.after, context.sizes_after)
    if before is None or after is None or before == after:
        return []
    way: Direction = "up" if after > before else "down"
    why = "units resharded to n ranks keep 1/n between forward and backward, as parameters"
    return [
        effect(Category.PARAMETERS, way, why, FSDP2, phase=phase, amount=after - before)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    ]


def _shard_size(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    fallback: Direction = "down" if rises(change) == "up" else "up"
    why = "padding and reduced shards follow the group's size"
    return (
        *_states(context, fallback),
        effect(Category.COMMUNICATION, "either", why, FSDP2),
    )


def _replicate_size(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:  # noqa: ARG001
    why = "reduced shards are all-reduced over the replicas, in a buffer of their own"
    return (effect(Category.COMMUNICATION, "either", why, FSDP2),)


def _world_size(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    if not context.sharded:
        return ()
    fallback: Direction = "down" if rises(change) == "up" else "up"
    return (
        *_states(context, fallback),
        effect(Category.COMMUNICATION, "either", "padding follows the group's size", FSDP2),
    )


def _unit(change: ConfigChange, context: EffectContext) -> tuple[Effect, ...]:
    larger = _units_grow(change)
    why = "one unit, and the next one gathered ahead, is whole at a time"
    found = [
        computed(context, Category.UNSHARDED_PARAMETERS, larger, why, FSDP2, zero_is_open=True)
    ]
    for category, reason in (
        (Category.UNSHARDED_GRADIENTS, "a unit's gradients are whole until they are reduced"),
        (Category.COMMUNICATION, "gather and reduce buffers are as large as a unit"),
        (Category.TEMPORARIES, "a unit's gradients are cast and copied together"),
    ):
        found.append(effect(category, larger, reason, FSDP2))
    why = "each unit, or each parameter in it, is padded to the shard size"
    found.append(effect(Category.PARAMETERS, "either", why, GUESS))
    return tuple(found)


def _units_grow(change: ConfigChange) -> Direction:
    if change.a.value == "whole" or change.b.value == "whole":
        return "up" if change.b.value == "whole" else "down"
    return rises(change)


RULES: dict[str, EffectRule] = {
    "sharding.impl": _engine,
    "sharding.strategy": _strategy,
    "sharding.reshard_after_forward": _reshard,
    "sharding.reshard_after_forward[root]": _reshard,
    "sharding.shard_size": _shard_size,
    "sharding.replicate_size": _replicate_size,
    "sharding.unit": _unit,
    "sharding.blocks_per_unit": _unit,
    "world.size": _world_size,
}
