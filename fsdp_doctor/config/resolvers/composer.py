"""Composer's FSDP under llm-foundry's YAML.

Source: composer 64051888 (2026-04-29): composer/utils/parallelism.py (FSDPConfig),
composer/distributed/mosaic_parallelism.py, composer/trainer/trainer.py.
"""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.resolvers.draft import Draft
from fsdp_doctor.config.resolvers.engines_native import (
    World,
    ddp_strategy,
    flat_params,
    fsdp1_strategy,
    fsdp2_strategy,
    offload_with_shards,
)
from fsdp_doctor.config.resolvers.words import (
    as_bool,
    as_int,
    as_number,
    dtype,
    number_or_word,
    optimizer_kind,
    sharding_strategy,
)
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("composer",)
ASSUMED: dict[str, str] = {"composer": "HEAD"}
_BLOCKS = ("fsdp_config.", "parallelism_config.fsdp.")
_ONLY_1 = (
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "sharding_strategy",
    "sync_module_states",
    "flatten_parameters",
)


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of a Composer YAML."""
    draft = Draft(native, version)
    block = next((b for b in _BLOCKS if draft.section(b)), None)
    _batch(draft)
    _model(draft)
    if block is None:
        draft.derive("sharding.impl", "ddp", (), "no fsdp_config")
        ddp_strategy(draft, ("fsdp_config",), World())
        draft.put("precision.autocast", _compute(draft), "precision")
        _ddp_sync(draft)
    else:
        _fsdp(draft, block)
    return draft.finish("Composer's FSDPConfig does not have this key")


def _compute(draft: Draft) -> str:
    return dtype(draft.raw("precision", default="amp_bf16")) or "float32"


def _batch(draft: Draft) -> None:
    names = ("device_train_microbatch_size", "device_train_grad_accum")
    draft.take("batch.micro", names, None, number_or_word)
    draft.take("batch.global", "global_train_batch_size", None, number_or_word)
    draft.take("batch.seq_len", ("max_seq_len", "variables.max_seq_len"), None, as_int)
    draft.take("optimizer.kind", "optimizer.name", "adamw", optimizer_kind)
    draft.take("optimizer.learning_rate", "optimizer.lr", None, as_number)
    draft.take("optimizer.weight_decay", "optimizer.weight_decay", None, as_number)
    clip = "algorithms.gradient_clipping.clipping_threshold"
    draft.take("optimizer.grad_clip", clip, None, as_number)
    compiled = [key for key in draft.fields if key.split(".")[0] == "compile_config"]
    if compiled:
        draft.put("compile.enabled", True, tuple(compiled))
    if draft.has("expandable_segments") and as_bool(draft.raw("expandable_segments")):
        draft.put("env.alloc_conf", "expandable_segments:True", "expandable_segments")


def _model(draft: Draft) -> None:
    for key, names in (
        ("model.hidden", ("model.d_model",)),
        ("model.heads", ("model.n_heads",)),
        ("model.layers", ("model.n_layers",)),
        ("model.vocab", ("model.vocab_size",)),
    ):
        if draft.has(*names):
            draft.take(key, names, None, as_int)
    if draft.has("model.pretrained_model_name_or_path"):
        draft.take("model.name", "model.pretrained_model_name_or_path")
    device = "model.init_device"
    if draft.has(device):
        draft.take("init.device", device)


def _ddp_sync(draft: Draft) -> None:
    word = str(draft.raw("ddp_sync_strategy", default="single_auto_sync")).lower()
    value = "last_microbatch" if word == "single_auto_sync" else "every_microbatch"
    draft.put("comm.grad_sync", value, "ddp_sync_strategy")


def _fsdp(draft: Draft, block: str) -> None:
    number = as_int(draft.raw(f"{block}version", f"{block}fsdp_version"), 1) or 1
    names = (f"{block}version", f"{block}fsdp_version")
    draft.put("sharding.impl", "fsdp2" if number == 2 else "fsdp1", (*names, block.rstrip(".")))
    replicate = f"{block}data_parallel_replicate_degree"
    if number == 2:
        key = f"{block}reshard_after_forward"
        fsdp2_strategy(draft, as_bool(draft.raw(key), True), key, World(), "as written, or true")
        draft.drop([f"{block}{name}" for name in _ONLY_1], "FSDP2 ignores it, with a warning")
        flat_params(draft, "per_parameter", (), "FSDP2 keeps single parameters as DTensors")
    else:
        _fsdp1(draft, block)
    if draft.has(replicate):
        draft.take("sharding.replicate_size", replicate, None, as_int)
    if draft.has(f"{block}data_parallel_shard_degree"):
        draft.take("sharding.shard_degree", f"{block}data_parallel_shard_degree", -1, as_int)
    offload = f"{block}cpu_offload"
    offload_with_shards(draft, offload, as_bool(draft.raw(offload)))
    _precision(draft, block)
    on = as_bool(draft.raw(f"{block}activation_checkpointing"))
    draft.put("recompute.mode", "full" if on else "none", f"{block}activation_checkpointing")
    draft.take("recompute.reentrant", f"{block}activation_checkpointing_reentrant", True, as_bool)
    if not on:
        draft.inert("recompute.reentrant", "activation checkpointing is off")
    moved = f"{block}activation_cpu_offload"
    draft.put("offload.activations", "cpu" if as_bool(draft.raw(moved)) else "none", moved)
    draft.take("ckpt.state_dict", f"{block}state_dict_type", "full", lambda v: str(v).lower())
    draft.derive("comm.grad_sync", "every_microbatch", (), "under FSDP every microbatch reduces")
    draft.drop(("ddp_sync_strategy",), "acts on DDP models only")


def _fsdp1(draft: Draft, block: str) -> None:
    key = f"{block}sharding_strategy"
    strategy = sharding_strategy(draft.raw(key, default="FULL_SHARD")) or "FULL_SHARD"
    fsdp1_strategy(draft, strategy, key, World(), None)
    words = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NONE": "none"}
    draft.take(
        "comm.prefetch_bwd",
        f"{block}backward_prefetch",
        "post",
        lambda value: words.get(str(value).upper(), str(value)),
        reason="Composer's default is BACKWARD_POST",
    )
    draft.take("comm.prefetch_fwd", f"{block}forward_prefetch", False, as_bool)
    draft.take("comm.limit_all_gathers", f"{block}limit_all_gathers", True, as_bool)
    original = as_bool(draft.raw(f"{block}use_orig_params"), True)
    layout = "flat_with_views" if original else "flat"
    flat_params(draft, layout, f"{block}use_orig_params", "use_orig_params")
    keep = f"{block}keep_low_precision_grads"
    draft.take("fsdp1.keep_low_precision_grads", keep, False, as_bool)
    draft.take("init.sync_module_states", f"{block}sync_module_states", False, as_bool)


def _precision(draft: Draft, block: str) -> None:
    key = f"{block}mixed_precision"
    compute = _compute(draft)
    policy = draft.section(f"{key}.")
    names: tuple[str, ...] = (key, "precision")
    if policy:
        _policy(draft, key, policy, compute)
        return
    word = str(draft.raw(key, default="DEFAULT")).upper()
    if word == "FULL":
        compute = "float32"
    reduce = compute if word == "PURE" else "float32"
    draft.put("precision.compute", compute, ("precision", key), f"mixed_precision: {word}")
    draft.put("precision.reduce", reduce, names, f"mixed_precision: {word}")
    draft.derive("precision.param_storage", "float32", names, "parameters are kept in fp32")
    for name in ("grad", "optim_states"):
        draft.derive(f"precision.{name}", "float32", names, "as the stored parameters")


def _policy(draft: Draft, key: str, policy: dict[str, Any], compute: str) -> None:
    for name, canonical, default in (
        ("param_dtype", "precision.compute", compute),
        ("reduce_dtype", "precision.reduce", "float32"),
        ("buffer_dtype", "precision.buffer", None),
    ):
        draft.take(canonical, f"{key}.{name}", default, dtype)
    draft.claim(*(f"{key}.{name}" for name in policy if name.endswith("_dtype")), "precision")
    draft.derive("precision.param_storage", "float32", (key,), "parameters are kept in fp32")
