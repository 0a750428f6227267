"""torchtitan v0.0.1 (2024) to HEAD (2026-08): FSDP2 on by default, recomputation too.

Source: torchtitan/config/job_config.py (v0.1.0, v0.2.2), config/configs.py (b5bcd76c),
distributed/fsdp.py, distributed/parallel_dims.py.
"""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.resolvers.draft import Draft
from fsdp_doctor.config.resolvers.engines_native import (
    World,
    ddp_strategy,
    flat_params,
    fsdp2_strategy,
    offload_all,
)
from fsdp_doctor.config.resolvers.words import as_bool, as_int, as_number, dtype, optimizer_kind
from fsdp_doctor.config.versions import at_least
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("torchtitan",)
ASSUMED: dict[str, str] = {"torchtitan": "0.2.2"}
VERSIONS: dict[str, tuple[str, ...]] = {"torchtitan": ("0.1.0", "0.2.2", "HEAD")}
_SHARD = (
    "parallelism.data_parallel_shard_degree",
    "training.data_parallel_shard_degree",
    "training.data_parallel_degree",
)
_REPLICATE = (
    "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_replicate_degree",
)
_RESHARD = "parallelism.fsdp_reshard_after_forward"


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of a torchtitan TOML."""
    draft = Draft(native, version)
    _parallel(draft)
    _sharding(draft)
    _batch(draft, version)
    _recompute(draft)
    _optimizer(draft)
    _compile(draft)
    _checkpoint(draft)
    _float8(draft)
    for key, name in (("model.name", "model.name"), ("model.flavor", "model.flavor")):
        draft.take(key, name)
    draft.take("model.assets", ("model.hf_assets_path", "model.tokenizer_path"))
    return draft.finish("torchtitan does not know this table")


def _degree(draft: Draft, key: str, *names: str) -> int:
    return int(draft.take(key, names, 1, lambda value: as_int(value, 1)))


def _parallel(draft: Draft) -> None:
    old = "training.tensor_parallel_degree"
    _degree(draft, "parallel.tp", "parallelism.tensor_parallel_degree", old)
    experimental = "experimental.pipeline_parallel_degree"
    _degree(draft, "parallel.pp", "parallelism.pipeline_parallel_degree", experimental)
    experimental = "experimental.context_parallel_degree"
    _degree(draft, "parallel.cp", "parallelism.context_parallel_degree", experimental)
    _degree(draft, "parallel.ep", "parallelism.expert_parallel_degree")
    _degree(draft, "parallel.etp", "parallelism.expert_tensor_parallel_degree")
    asynchronous = (
        "parallelism.enable_async_tensor_parallel",
        "experimental.enable_async_tensor_parallel",
    )
    draft.take("comm.async_tp", asynchronous, False, as_bool)
    if draft.values["parallel.tp"].value == 1:
        draft.inert("comm.async_tp", "tensor_parallel_degree is 1")
    schedule = ("parallelism.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
    draft.take("parallel.pp_schedule", schedule, "1F1B")
    if draft.values["parallel.pp"].value == 1:
        draft.inert("parallel.pp_schedule", "pipeline_parallel_degree is 1")


def _sharding(draft: Draft) -> None:
    shard = as_int(draft.raw(*_SHARD), -1) or -1
    replicate = as_int(draft.raw(*_REPLICATE), 1) or 1
    sharded = shard != 1 or draft.values["parallel.cp"].value > 1
    why = "data_parallel_shard_degree -1: all ranks left over" if shard == -1 else None
    draft.put("sharding.replicate_size", replicate, _REPLICATE)
    if sharded:
        draft.put("sharding.impl", "fsdp2", _SHARD, why)
        draft.put("sharding.shard_degree", shard, _SHARD, why)
        reshard, reason = _reshard(draft)
        fsdp2_strategy(draft, reshard, (_RESHARD,), World(), reason)
        draft.put("sharding.reshard_after_forward[last]", _last(draft), (_RESHARD,), _LAST)
        flat_params(draft, "per_parameter", (), "FSDP2 keeps single parameters as DTensors")
        draft.derive("comm.prefetch_bwd", "pre", (), "FSDP2 gathers the next unit in backward")
        draft.derive("sharding.unit", "block", (), "one unit a block, norm and output in another")
    else:
        draft.put("sharding.impl", "ddp" if replicate > 1 else "none", (*_SHARD, *_REPLICATE))
        ddp_strategy(draft, _REPLICATE, World())
        draft.drop((_RESHARD,), "nothing is sharded")
    _precision(draft, sharded)
    offloaded = as_bool(draft.raw("training.enable_cpu_offload"))
    offload_all(draft, "training.enable_cpu_offload", offloaded)
    draft.derive("comm.grad_sync", "every_microbatch", (), "torchtitan never skips a reduction")


_LAST = "norm and output stay gathered unless always"


def _reshard(draft: Draft) -> tuple[bool, str]:
    word = str(draft.raw(_RESHARD, default="default")).lower()
    if word in ("always", "never"):
        return word == "always", word
    pipelined = draft.values["parallel.pp"].value > 1
    return not pipelined, "default: true unless the pipeline has several stages"


def _last(draft: Draft) -> bool:
    return str(draft.raw(_RESHARD, default="default")).lower() == "always"


def _precision(draft: Draft, sharded: bool) -> None:
    storage = dtype(draft.raw("training.dtype", default="float32")) or "float32"
    draft.put("precision.param_storage", storage, "training.dtype")
    draft.derive("precision.grad", storage, ("training.dtype",), "as the stored parameters")
    draft.derive("precision.optim_states", storage, ("training.dtype",), "as the parameters")
    for key, name, default in (
        ("precision.compute", "training.mixed_precision_param", "bfloat16"),
        ("precision.reduce", "training.mixed_precision_reduce", "float32"),
    ):
        draft.take(key, name, default, dtype)
        if not sharded:
            draft.inert(key, "acts with FSDP or context parallel only")


def _batch(draft: Draft, version: str | None) -> None:
    tokens = "training.num_tokens_per_microbatch_per_dp_rank"
    if draft.has(tokens) or version == "HEAD":
        draft.take("batch.micro_tokens", tokens, 16384, as_int)
    else:
        names = ("training.local_batch_size", "training.batch_size")
        draft.take("batch.micro", names, 8, as_int)
    draft.take("batch.seq_len", "training.seq_len", 2048, as_int)
    total = draft.take("batch.global", "training.global_batch_size", -1, as_int)
    if total == -1:
        draft.values.pop("batch.global")


def _recompute(draft: Draft) -> None:
    table = "activation_checkpoint."
    mode = str(draft.raw(f"{table}mode", default="selective")).lower()
    why = None if draft.has(f"{table}mode") else "not written: selective, not off"
    draft.put("recompute.mode", mode, f"{table}mode", why)
    option = str(draft.raw(f"{table}selective_ac_option", default="2"))
    value: Any = "op" if option == "op" else as_int(option, 2)
    why = "by operator" if value == "op" else f"every {value}th layer"
    draft.put("recompute.granularity", value, f"{table}selective_ac_option", why)
    if mode != "selective":
        draft.inert("recompute.granularity", f"read with mode selective only, not {mode}")
    early = f"{table}early_stop"
    if draft.has(early):
        draft.take("recompute.early_stop", early, False, as_bool)
    draft.take("recompute.memory_budget", f"{table}memory_budget", 0.5, as_number)
    if mode != "memory_budget":
        draft.inert("recompute.memory_budget", f"read with mode memory_budget only, not {mode}")


def _optimizer(draft: Draft) -> None:
    draft.take("optimizer.kind", "optimizer.name", "adamw", optimizer_kind)
    word = str(draft.raw("optimizer.implementation", default="fused")).lower()
    word = {"for-loop": "for_loop"}.get(word, word)
    names = ("optimizer.implementation", "optimizer.fused")
    if draft.fields.get("optimizer.fused") and not draft.has("optimizer.implementation"):
        word = "fused" if as_bool(draft.raw("optimizer.fused")) else "foreach"
    draft.put("optimizer.implementation", word, names)
    draft.take("optimizer.learning_rate", "optimizer.lr", None, as_number)
    old = "optimizer.early_step_in_backward"
    draft.take("optimizer.in_backward", old, False, as_bool)
    draft.take("optimizer.grad_clip", "training.max_norm", 1.0, as_number)


def _compile(draft: Draft) -> None:
    on = draft.take("compile.enabled", ("compile.enable", "training.compile"), False, as_bool)
    draft.take("compile.components", "compile.components", ["model", "loss"])
    if not on:
        draft.inert("compile.components", "compile is off")


def _checkpoint(draft: Draft) -> None:
    names = ("checkpoint.enable", "checkpoint.enable_checkpoint")
    on = draft.take("ckpt.enabled", names, False, as_bool)
    mode = "checkpoint.async_mode"
    draft.take("ckpt.async", mode, "disabled")
    last = (
        "checkpoint.last_save_model_only",
        "checkpoint.last_save_model_weights_only",
        "checkpoint.model_weights_only",
    )
    draft.take("ckpt.last_model_only", last, at_least(draft.version, "0.2"), as_bool)
    if not on:
        for key in ("ckpt.async", "ckpt.last_model_only"):
            draft.inert(key, "checkpoints are off")


def _float8(draft: Draft) -> None:
    converters = draft.raw("model.converters", default=[])
    listed = converters if isinstance(converters, list) else [converters]
    named = [str(item) for item in listed]
    on = any("float8" in item for item in named) or bool(draft.raw("training.fp8_linear"))
    on = on or as_bool(draft.raw("float8.enable_float8_linear"))
    keys = ("model.converters", "training.fp8_linear", "float8.enable_float8_linear")
    draft.put("precision.fp8", on, keys)
    if on:
        gather = "enable_fsdp_float8_all_gather"
        names = (f"quantize.linear.float8.{gather}", f"float8.{gather}")
        draft.take("comm.float8_all_gather", names, False, as_bool)
    else:
        why = "model.converters does not list float8"
        draft.drop_section("quantize.linear.float8.", why)
        draft.drop_section("float8.", why)
    if not any("mx" in item for item in named):
        for prefix in ("quantize.linear.mx.", "mx."):
            draft.drop_section(prefix, "model.converters does not list mx")
