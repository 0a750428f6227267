"""verl's FSDP engine, of the actor in a whole trainer config.

Source: verl 1dda039b (2026-08-22): verl/workers/engine/fsdp/transformer_impl.py,
verl/workers/config/engine.py.
"""

from __future__ import annotations

from fsdp_doctor.config.resolvers.draft import Draft
from fsdp_doctor.config.resolvers.engines_native import (
    World,
    flat_params,
    fsdp1_strategy,
    fsdp2_strategy,
    offload_all,
)
from fsdp_doctor.config.resolvers.words import as_bool, as_int, as_number, dtype
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("verl",)
ASSUMED: dict[str, str] = {"verl": "HEAD"}
_ACTORS = ("actor_rollout_ref.actor.", "actor.", "")
_MODEL = ("actor_rollout_ref.model.", "model.", "")


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of verl's actor, or of an engine part."""
    draft = Draft(native, version)
    actor = next(a for a in _ACTORS if not a or draft.section(a))
    engine = next(
        (p for p in (f"{actor}fsdp_config.", f"{actor}engine.") if draft.section(p)), actor
    )
    strategy = (f"{engine}strategy", f"{actor}strategy")
    if str(draft.raw(*strategy, default="fsdp")).lower() in ("fsdp", "fsdp2", "fsdp_turbo"):
        _engine(draft, engine, strategy)
    else:
        draft.take("sharding.impl", strategy, None, str)
    _batch(draft, actor)
    _recompute(draft)
    for block in ("qat", "turbo_config"):
        on = as_bool(draft.raw(f"{engine}{block}.enable"))
        if block == "turbo_config":
            on = str(draft.raw(*strategy, default="fsdp")).lower() == "fsdp_turbo"
        if not on:
            draft.drop_section(f"{engine}{block}.", f"{block} is not switched on")
    return draft.finish()


def _engine(draft: Draft, engine: str, strategy: tuple[str, str]) -> None:
    impl = "fsdp1" if str(draft.raw(*strategy, default="fsdp")).lower() == "fsdp" else "fsdp2"
    draft.put("sharding.impl", impl, strategy, "fsdp, fsdp2 or fsdp_turbo")
    reshard_key, size_key = f"{engine}reshard_after_forward", f"{engine}fsdp_size"
    reshard = as_bool(draft.raw(reshard_key), True)
    size = as_int(draft.raw(size_key), -1) or -1
    if impl == "fsdp1":
        _fsdp1(draft, engine, reshard, size)
    else:
        why = "as written, or true"
        fsdp2_strategy(draft, reshard, reshard_key, World(), why)
        draft.derive("comm.prefetch_bwd", "pre", (), "FSDP2 gathers the next unit in backward")
        flat_params(draft, "per_parameter", (), "FSDP2 keeps single parameters as DTensors")
        for name in ("forward_prefetch", "use_orig_params"):
            draft.drop((f"{engine}{name}",), "read with strategy: fsdp only")
    if size > 0:
        draft.put("sharding.replicate_size", "ranks / fsdp_size", size_key, "a 2-D mesh")
        draft.put("sharding.shard_size", size, size_key)
    _offload(draft, engine, impl)
    _precision(draft, engine)
    key = f"{engine}wrap_policy.min_num_params"
    least = as_int(draft.raw(key), 0) or 0
    named = f"{engine}wrap_policy.transformer_layer_cls_to_wrap"
    unit = f"size:{least}" if least else draft.raw(named, default="block")
    draft.put("sharding.unit", unit, (key, named), "the model's _no_split_modules unless given")
    draft.take("compile.enabled", f"{engine}use_torch_compile", True, as_bool)
    ulysses = f"{engine}ulysses_sequence_parallel_size"
    draft.take("parallel.sp", ulysses, 1, as_int)
    each = "last_microbatch"
    draft.derive("comm.grad_sync", each, (), "all but the last microbatch run under no_sync")


def _fsdp1(draft: Draft, engine: str, reshard: bool, size: int) -> None:
    names = (f"{engine}reshard_after_forward", f"{engine}fsdp_size")
    hybrid = size > 0
    word = {
        (False, True): "FULL_SHARD",
        (False, False): "SHARD_GRAD_OP",
        (True, True): "HYBRID_SHARD",
        (True, False): "HYBRID_SHARD_ZERO2",
    }[hybrid, reshard]
    fsdp1_strategy(draft, word, names, World(), f"FSDP1 runs as {word}")
    draft.take("comm.prefetch_fwd", f"{engine}forward_prefetch", False, as_bool)
    draft.derive("comm.prefetch_bwd", "pre", (), "torch's default")
    original = as_bool(draft.raw(f"{engine}use_orig_params"))
    layout = "flat_with_views" if original else "flat"
    flat_params(draft, layout, f"{engine}use_orig_params", "use_orig_params")


def _offload(draft: Draft, engine: str, impl: str) -> None:
    policy, forward = f"{engine}offload_policy", f"{engine}forward_only"
    on = as_bool(draft.raw(policy))
    only = as_bool(draft.raw(forward))
    if impl == "fsdp2":
        offload_all(draft, (policy, forward), on or only)
    else:
        offload_all(draft, forward, only)
        draft.drop((policy,), "read with strategy: fsdp2 only")
    for key, name in (
        ("offload.idle_params", f"{engine}param_offload"),
        ("offload.idle_optimizer", f"{engine}optimizer_offload"),
    ):
        draft.take(key, name, False, as_bool)
        if impl == "fsdp2" and on:
            draft.inert(key, "offload_policy turns it off")


def _precision(draft: Draft, engine: str) -> None:
    policy = f"{engine}mixed_precision."
    storage = (f"{engine}model_dtype",)
    draft.take("precision.param_storage", storage, "float32", dtype)
    names = (f"{policy}param_dtype", f"{engine}dtype")
    draft.take("precision.compute", names, "bfloat16", dtype)
    draft.take("precision.reduce", f"{policy}reduce_dtype", "float32", dtype)
    draft.take("precision.buffer", f"{policy}buffer_dtype", "float32", dtype)
    for name in ("grad", "optim_states"):
        value = draft.values["precision.param_storage"].value
        draft.derive(f"precision.{name}", value, storage, "as the stored parameters")


def _batch(draft: Draft, actor: str) -> None:
    for key, names in (
        ("batch.micro", (f"{actor}ppo_micro_batch_size_per_gpu", "data.micro_batch_size_per_gpu")),
        ("batch.global", (f"{actor}ppo_mini_batch_size", "data.train_batch_size")),
        ("batch.micro_tokens", (f"{actor}ppo_max_token_len_per_gpu",)),
        ("batch.seq_len", ("data.max_length",)),
        ("optimizer.grad_clip", (f"{actor}grad_clip", "optim.clip_grad")),
        ("optimizer.learning_rate", (f"{actor}optim.lr", "optim.lr")),
    ):
        if draft.has(*names):
            draft.take(key, names, None, as_number)
    dynamic = f"{actor}use_dynamic_bsz"
    if draft.has(dynamic):
        on = draft.take("batch.dynamic", dynamic, False, as_bool)
        draft.inert("batch.micro" if on else "batch.micro_tokens", f"use_dynamic_bsz is {on}")


def _recompute(draft: Draft) -> None:
    names = tuple(f"{model}enable_gradient_checkpointing" for model in _MODEL)
    if draft.has(*names):
        on = as_bool(draft.raw(*names))
        draft.put("recompute.mode", "full" if on else "none", names)
    moved = tuple(f"{model}enable_activation_offload" for model in _MODEL)
    if draft.has(*moved):
        draft.put("offload.activations", "cpu" if as_bool(draft.raw(*moved)) else "none", moved)
    kernels = tuple(f"{model}use_remove_padding" for model in _MODEL)
    if draft.has(*kernels):
        draft.take("batch.packing", kernels, False, as_bool)
