"""What torch's DDP, FSDP1 and FSDP2 make of a framework's choices, whatever the framework."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_doctor.config.resolvers.draft import Draft

MIB = 1 << 20
DDP_BUCKET_BYTES = 25 * MIB
"""torch/nn/parallel/distributed.py: _DEFAULT_BUCKET_CAP_MB, in MiB."""
SHARDED = "optim_grads_params"
_RESHARDING = frozenset({"FULL_SHARD", "HYBRID_SHARD"})
_HYBRID = frozenset({"HYBRID_SHARD", "HYBRID_SHARD_ZERO2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Ranks of a job, as far as a config tells."""

    size: int | None = None
    nodes: int | None = None
    natives: tuple[str, ...] = ()


def engine(draft: Draft, impl: str, natives: str | tuple[str, ...], reason: str) -> None:
    """Set which engine runs: what is written in ``natives``, or the framework's choice."""
    draft.put("sharding.impl", impl, natives, reason)


def fsdp1_strategy(
    draft: Draft, strategy: str, natives: str | tuple[str, ...], world: World, reason: str | None
) -> None:
    """Set what an FSDP1 strategy shards, when it reshards, and over which ranks.

    Source: torch/distributed/fsdp/_init_utils.py, _runtime_utils.py (2.13).
    """
    names = (natives,) if isinstance(natives, str) else natives
    if world.size == 1 and strategy != "NO_SHARD":
        draft.put("sharding.strategy", "none", natives, f"one rank: FSDP1 turns {strategy} off")
        return
    sharded = strategy != "NO_SHARD"
    draft.put("sharding.strategy", SHARDED if sharded else "none", natives, reason)
    if not sharded:
        return
    key = "sharding.reshard_after_forward"
    draft.put(key, strategy in _RESHARDING, natives, f"{strategy} says so")
    draft.derive(f"{key}[root]", False, names, "FSDP1 never reshards the root after forward")
    _groups(draft, strategy in _HYBRID, names, world)


def _groups(draft: Draft, hybrid: bool, natives: tuple[str, ...], world: World) -> None:
    also = (*natives, *world.natives)
    if not hybrid:
        draft.derive("sharding.replicate_size", 1, also, "one group of all ranks")
        if world.size is not None:
            draft.derive("sharding.shard_size", world.size, also, "one group of all ranks")
        return
    why = "hybrid: shards within a node, replicates across nodes"
    draft.put("sharding.replicate_size", world.nodes or "nodes", also, why)
    if world.size is not None and world.nodes:
        draft.derive("sharding.shard_size", world.size // world.nodes, also, why)


def fsdp2_strategy(
    draft: Draft, reshard: bool | int, natives: str | tuple[str, ...], world: World, reason: str
) -> None:
    """Set what fully_shard does: all three are sharded; the root is not resharded when unset.

    ``natives``: the keys that hold ``reshard_after_forward``.
    """
    names = (natives,) if isinstance(natives, str) else natives
    draft.derive("sharding.strategy", SHARDED, names, "fully_shard shards all three")
    draft.put("sharding.reshard_after_forward", reshard, natives, reason)
    if "sharding.replicate_size" not in draft.values:
        _groups(draft, False, names, world)


def flat_params(draft: Draft, layout: str, natives: str | tuple[str, ...], reason: str) -> None:
    """Set how a unit holds its parameters: flat, flat_with_views or per_parameter."""
    draft.put("sharding.flat_params", layout, natives, reason)


def offload_with_shards(draft: Draft, natives: str | tuple[str, ...], offloaded: bool) -> None:
    """Set offload of parameters; gradients and optimizer state live where the shards are."""
    names = (natives,) if isinstance(natives, str) else natives
    place = "cpu" if offloaded else "none"
    draft.put("offload.params", place, natives)
    for name in ("grads", "optimizer"):
        draft.derive(f"offload.{name}", place, names, "they live where the sharded parameters are")


def offload_all(draft: Draft, natives: str | tuple[str, ...], offloaded: bool) -> None:
    """Set offload of a switch that names parameters, gradients and optimizer state together."""
    for name in ("params", "grads", "optimizer"):
        draft.put(f"offload.{name}", "cpu" if offloaded else "none", natives)


def ddp_strategy(draft: Draft, natives: str | tuple[str, ...], world: World) -> None:
    """Set what DistributedDataParallel does: every rank holds everything."""
    names = (natives,) if isinstance(natives, str) else natives
    draft.derive("sharding.strategy", "none", names, "DDP divides nothing")
    draft.derive("sharding.shard_size", 1, names, "DDP divides nothing")
    if world.size is not None:
        draft.derive("sharding.replicate_size", world.size, (*names, *world.natives), "all ranks")


def bucket_bytes(cap_mib: float | None) -> int:
    """Return DDP's bucket in bytes from its cap in MiB; null is torch's 25."""
    return DDP_BUCKET_BYTES if cap_mib is None else int(cap_mib * MIB)


def mixed(draft: Draft, name: str | None, natives: str | tuple[str, ...]) -> None:
    """Set dtypes of FSDP's mixed precision: fp32 storage, ``name`` for compute and reduction."""
    names = (natives,) if isinstance(natives, str) else natives
    draft.put("precision.compute", name, natives)
    draft.derive("precision.param_storage", "float32", names, "upcast: a full-precision copy")
    draft.derive("precision.grad", "float32", names, "as the stored parameters")
    draft.derive("precision.optim_states", "float32", names, "as the stored parameters")
    draft.derive("precision.reduce", name, names, "as computed")
