"""OLMo's trainer: FSDP1 or DDP.

Source: OLMo 59a53e3f (2025-09-04): olmo/config.py (FSDPConfig, DDPConfig), olmo/train.py.
"""

from __future__ import annotations

from fsdp_doctor.config.resolvers.draft import Draft
from fsdp_doctor.config.resolvers.engines_native import (
    World,
    ddp_strategy,
    flat_params,
    fsdp1_strategy,
)
from fsdp_doctor.config.resolvers.words import (
    as_bool,
    as_int,
    as_number,
    dtype,
    optimizer_kind,
    sharding_strategy,
)
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("olmo",)
ASSUMED: dict[str, str] = {"olmo": "0.6.0"}


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of an OLMo YAML."""
    draft = Draft(native, version)
    word = str(draft.raw("distributed_strategy", default="fsdp")).lower()
    if word == "ddp":
        _ddp(draft)
    else:
        _fsdp(draft)
    _training(draft)
    return draft.finish()


def _fsdp(draft: Draft) -> None:
    draft.put("sharding.impl", "fsdp1", "distributed_strategy")
    key = "fsdp.sharding_strategy"
    strategy = sharding_strategy(draft.raw(key, default="FULL_SHARD")) or "FULL_SHARD"
    fsdp1_strategy(draft, strategy, key, World(), None)
    replicas = "fsdp.hybrid_sharding_num_model_replicas"
    if strategy.startswith("HYBRID"):
        if draft.has(replicas):
            draft.take("sharding.replicate_size", replicas, None, as_int)
    else:
        draft.drop((replicas,), "read with a HYBRID strategy only")
    wrap = draft.raw("fsdp.wrapping_strategy")
    why = "null: one unit holds all" if wrap is None else None
    draft.put("sharding.unit", _unit(wrap), "fsdp.wrapping_strategy", why)
    draft.take("fsdp.use_orig_params", "fsdp.use_orig_params", True, as_bool)
    original = draft.values.pop("fsdp.use_orig_params").value
    layout = "flat_with_views" if original else "flat"
    flat_params(draft, layout, "fsdp.use_orig_params", "use_orig_params")
    draft.derive("comm.limit_all_gathers", True, (), "always on in OLMo")
    draft.derive("comm.prefetch_bwd", "pre", (), "torch's default")
    draft.derive("comm.grad_sync", "every_microbatch", (), "under FSDP every microbatch reduces")
    draft.drop_section("ddp.", "distributed_strategy is fsdp")
    compute = dtype(draft.raw("precision", default="amp_bf16")) or "float32"
    word = str(draft.raw("fsdp.precision", default="pure")).lower()
    draft.put("precision.compute", compute, ("precision", "fsdp.precision"), word)
    reduce = "float32" if word == "mixed" else compute
    draft.put("precision.reduce", reduce, ("fsdp.precision", "precision"), f"{word}: see OLMo")
    draft.derive("precision.param_storage", "float32", (), "parameters are kept in fp32")
    for name in ("grad", "optim_states"):
        draft.derive(f"precision.{name}", "float32", (), "as the stored parameters")


def _unit(word: object) -> str:
    return "whole" if word is None else "block" if word == "by_block" else str(word)


def _ddp(draft: Draft) -> None:
    draft.put("sharding.impl", "ddp", "distributed_strategy")
    ddp_strategy(draft, "distributed_strategy", World())
    word = str(draft.raw("ddp.grad_sync_mode", default="batch")).lower()
    value = "last_microbatch" if word == "batch" else "every_microbatch"
    draft.put("comm.grad_sync", value, "ddp.grad_sync_mode")
    draft.take("ddp.find_unused_parameters", "ddp.find_unused_params", False, as_bool)
    draft.put("precision.autocast", dtype(draft.raw("precision")) or "none", "precision")
    draft.drop_section("fsdp.", "distributed_strategy is ddp")


def _training(draft: Draft) -> None:
    draft.take("batch.micro", "device_train_microbatch_size", 16, as_int)
    draft.take("batch.global", "global_train_batch_size", 512, as_int)
    draft.take("batch.seq_len", "model.max_sequence_length", 1024, as_int)
    word = str(draft.raw("activation_checkpointing", default="none")).lower()
    mode = {"none": "none", "whole_layer": "full", "fine_grained": "selective"}.get(word, word)
    every = mode.startswith(("one_in", "two_in", "three_in"))
    draft.put("recompute.mode", "selective" if every else mode, "activation_checkpointing")
    if every:
        draft.put("recompute.granularity", word, "activation_checkpointing")
    compiled = bool(draft.section("compile."))
    keys = ("compile", *(f"compile.{name}" for name in draft.section("compile.")))
    draft.put("compile.enabled", compiled, keys)
    draft.take("optimizer.kind", "optimizer.name", "lionw", optimizer_kind)
    draft.take("optimizer.learning_rate", "optimizer.learning_rate", None, as_number)
    draft.take("optimizer.weight_decay", "optimizer.weight_decay", None, as_number)
    draft.take("optimizer.grad_clip", "max_grad_norm", None, as_number)
    for key, name in (
        ("model.hidden", "model.d_model"),
        ("model.layers", "model.n_layers"),
        ("model.heads", "model.n_heads"),
        ("model.ffn", "model.mlp_hidden_size"),
        ("model.vocab", "model.vocab_size"),
    ):
        if draft.has(name):
            draft.take(key, name, None, as_int)
    draft.take("model.tied_embeddings", "model.weight_tying", True, as_bool)
