"""Lightning's Trainer strategies; litgpt's pretraining on top of Fabric.

Source: lightning/pytorch/strategies/fsdp.py, ddp.py, deepspeed.py, model_parallel.py,
plugins/precision/fsdp.py (2.6.6).
"""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.resolvers import deepspeed
from fsdp_doctor.config.resolvers.draft import HIDDEN, Draft
from fsdp_doctor.config.resolvers.engines_native import (
    World,
    bucket_bytes,
    ddp_strategy,
    flat_params,
    fsdp1_strategy,
    offload_with_shards,
)
from fsdp_doctor.config.resolvers.lightning_words import (
    Strategy,
    deepspeed_defaults,
    precision,
    strategy_of,
)
from fsdp_doctor.config.resolvers.words import (
    as_bool,
    as_int,
    as_number,
    class_name,
    number_or_word,
    optimizer_kind,
    sharding_strategy,
)
from fsdp_doctor.config.versions import version_for
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("lightning",)
ASSUMED: dict[str, str] = {"lightning": "2.6.6"}
VERSIONS: dict[str, tuple[str, ...]] = {"lightning": ("2.5.6", "2.6.6")}


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of a Lightning YAML."""
    draft = Draft(native, version)
    root = "trainer." if draft.section("trainer.") else ""
    strategy = strategy_of(draft, root)
    if strategy.kind == "deepspeed":
        _deepspeed(draft, root, strategy)
    else:
        _ENGINES.get(strategy.kind, _other)(draft, root, strategy)
        precision(draft, root, sharded=strategy.kind in ("fsdp", "fsdp2"))
    _training(draft, root)
    return draft.finish()


def _world(draft: Draft, root: str) -> World:
    devices, nodes = as_int(draft.raw(f"{root}devices")), as_int(draft.raw(f"{root}num_nodes"), 1)
    draft.take("world.devices", f"{root}devices", "auto", number_or_word)
    draft.take("world.nodes", f"{root}num_nodes", 1, as_int)
    size = devices * nodes if devices and nodes and devices > 0 else None
    return World(size=size, nodes=nodes, natives=(f"{root}devices", f"{root}num_nodes"))


def _fsdp(draft: Draft, root: str, strategy: Strategy) -> None:
    arguments = strategy.arguments
    draft.put("sharding.impl", "fsdp1", strategy.names)
    key = f"{arguments}sharding_strategy"
    word = sharding_strategy(draft.raw(key, default="FULL_SHARD")) or "FULL_SHARD"
    fsdp1_strategy(draft, word, (key, *strategy.names), _world(draft, root), None)
    mesh = draft.raw(f"{arguments}device_mesh")
    if isinstance(mesh, list) and len(mesh) == 2:
        names = (f"{arguments}device_mesh",)
        draft.put("sharding.replicate_size", as_int(mesh[0]), names)
        draft.put("sharding.shard_size", as_int(mesh[1]), names)
    offload = f"{arguments}cpu_offload"
    block = draft.section(f"{offload}.")
    flags = [offload, *(f"{offload}.{name}" for name in block)]
    on = any(as_bool(draft.raw(name)) for name in flags if not name.endswith("class_path"))
    offload_with_shards(draft, (*flags, *strategy.names), on or strategy.offload)
    words = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post"}
    draft.take(
        "comm.prefetch_bwd",
        f"{arguments}backward_prefetch",
        "pre",
        lambda value: words.get(class_name(value).upper(), "none"),
        reason="torch's default is BACKWARD_PRE",
    )
    draft.take("comm.prefetch_fwd", f"{arguments}forward_prefetch", False, as_bool)
    draft.take("comm.limit_all_gathers", f"{arguments}limit_all_gathers", True, as_bool)
    original = as_bool(draft.raw(f"{arguments}use_orig_params"), True)
    layout = "flat_with_views" if original else "flat"
    flat_params(draft, layout, f"{arguments}use_orig_params", "Lightning's default is true")
    state = "full" if root else "sharded"
    draft.take("ckpt.state_dict", f"{arguments}state_dict_type", state)
    _policies(draft, arguments)
    draft.derive("comm.grad_sync", "last_microbatch", (), "Lightning accumulates under no_sync")


def _policies(draft: Draft, arguments: str) -> None:
    """Set wrap units and recomputed layers from policies, which are classes or lists of them."""
    wrap, recompute = f"{arguments}auto_wrap_policy", f"{arguments}activation_checkpointing_policy"
    classes = _classes(draft, wrap)
    keys = (wrap, *(f"{wrap}.{name}" for name in draft.section(f"{wrap}.")))
    draft.put("sharding.unit", classes or "whole", keys, None if classes else "no wrap policy")
    old = f"{arguments}activation_checkpointing"
    covered = _classes(draft, recompute) or _classes(draft, old)
    keys = tuple(
        key
        for base in (recompute, old)
        for key in (base, *(f"{base}.{name}" for name in draft.section(f"{base}.")))
    )
    draft.put("recompute.mode", "full" if covered else "none", keys)
    if covered:
        draft.put("recompute.granularity", covered, keys)


def _classes(draft: Draft, key: str) -> list[str]:
    named = draft.raw(
        f"{key}.init_args.module_classes", f"{key}.init_args.transformer_layer_cls", key
    )
    if named is None:
        return [class_name(draft.raw(f"{key}.class_path"))] if draft.section(f"{key}.") else []
    items = named if isinstance(named, list) else [named]
    return [class_name(item) for item in items]


def _model_parallel(draft: Draft, root: str, strategy: Strategy) -> None:
    """FSDP2 itself is in the user's module; the strategy only makes the mesh."""
    arguments = strategy.arguments
    draft.put("sharding.impl", "fsdp2", strategy.names, "the module calls fully_shard itself")
    _world(draft, root)
    why = "auto: ranks of a node"
    draft.take(
        "parallel.tp", f"{arguments}tensor_parallel_size", "auto", number_or_word, reason=why
    )
    why = "auto: nodes"
    size = f"{arguments}data_parallel_size"
    draft.take("sharding.shard_size", size, "auto", number_or_word, reason=why)
    save = f"{arguments}save_distributed_checkpoint"
    draft.take("ckpt.distributed", save, True, as_bool)


def _ddp(draft: Draft, root: str, strategy: Strategy) -> None:
    arguments = strategy.arguments
    draft.put("sharding.impl", "ddp", strategy.names)
    ddp_strategy(draft, strategy.names, _world(draft, root))
    draft.take(
        "comm.bucket_bytes",
        f"{arguments}bucket_cap_mb",
        bucket_bytes(None),
        lambda value: bucket_bytes(as_number(value)),
    )
    draft.take("comm.bucket_view", f"{arguments}gradient_as_bucket_view", False, as_bool)
    draft.take("ddp.static_graph", f"{arguments}static_graph", False, as_bool)
    find = f"{arguments}find_unused_parameters"
    unused = as_bool(draft.raw(find), strategy.find_unused)
    draft.put("ddp.find_unused_parameters", unused, (find, *strategy.names))
    hook = f"{arguments}ddp_comm_hook"
    draft.take("comm.hook", hook, "none", class_name)


def _other(draft: Draft, root: str, strategy: Strategy) -> None:
    draft.put("sharding.impl", strategy.kind, strategy.names)
    _world(draft, root)


_ENGINES = {"fsdp": _fsdp, "fsdp2": _model_parallel, "ddp": _ddp}


def _deepspeed(draft: Draft, root: str, strategy: Strategy) -> None:
    arguments = strategy.arguments
    _world(draft, root)
    defaults, inline = deepspeed_defaults(arguments, strategy)
    word = str(draft.raw(f"{root}precision", default="32-true")).lower()
    defaults |= {"bf16.enabled": word.startswith("bf16"), "fp16.enabled": word.startswith("16")}
    accumulate = f"{root}accumulate_grad_batches"
    inline |= {
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": f"{root}gradient_clip_val",
    }
    defaults["gradient_clipping"] = 0.0
    launcher = deepspeed.Launcher(
        prefix=f"{arguments}config.",
        inline=inline,
        defaults=defaults,
        hidden=as_int(draft.raw(HIDDEN)),
        reason=f"Lightning's {strategy.word}",
    )
    draft.claim(*strategy.names, f"{root}precision")
    known = version_for("deepspeed", {}, draft.native.packages)
    deepspeed.apply(draft, known or deepspeed.ASSUMED["deepspeed"], launcher)


def _training(draft: Draft, root: str) -> None:
    if "batch.accumulation" not in draft.values:
        draft.take("batch.accumulation", f"{root}accumulate_grad_batches", 1, as_int)
    if "optimizer.grad_clip" not in draft.values:
        clip = (f"{root}gradient_clip_val", "train.max_norm")
        draft.take("optimizer.grad_clip", clip, None, as_number)
    sizes: dict[str, tuple[str, ...]] = {
        "batch.micro": ("train.micro_batch_size", "data.init_args.batch_size", "data.batch_size"),
        "batch.global": ("train.global_batch_size",),
        "batch.seq_len": ("train.max_seq_length",),
    }
    for key, names in sizes.items():
        if draft.has(*names) and not _filled(draft, key):
            draft.take(key, names, None, number_or_word)
    paths = ("optimizer.class_path", "model.optimizer._target_", "optimizer._target_")
    if draft.has(*paths):
        draft.take("optimizer.kind", paths, None, optimizer_kind)
    flags: dict[str, Any] = {
        "optimizer.fused": ("optimizer.init_args.fused", "model.optimizer.fused"),
        "optimizer.foreach": ("optimizer.init_args.foreach", "model.optimizer.foreach"),
    }
    for key, names in flags.items():
        if draft.has(*names):
            draft.take(key, names, None, as_bool)
    rate = ("optimizer.init_args.lr", "model.optimizer.lr", "optimizer.lr")
    if draft.has(*rate):
        draft.take("optimizer.learning_rate", rate, None, as_number)


def _filled(draft: Draft, key: str) -> bool:
    return key in draft.values and draft.values[key].set
