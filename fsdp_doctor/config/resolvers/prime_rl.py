"""prime-rl: FSDP2 that offloads the optimizer and recomputes everything unless told otherwise.

Source: prime-rl 559b4477 (2026-08-21): src/prime_rl/configs/trainer.py, trainer/model.py.
"""

from __future__ import annotations

from fsdp_doctor.config.resolvers.draft import Draft
from fsdp_doctor.config.resolvers.engines_native import World, flat_params, fsdp2_strategy
from fsdp_doctor.config.resolvers.words import as_bool, as_int, as_number, dtype, optimizer_kind
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("prime-rl",)
ASSUMED: dict[str, str] = {"prime-rl": "HEAD"}


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of a prime-rl TOML."""
    draft = Draft(native, version)
    root = "trainer." if draft.section("trainer.model.") else ""
    model = f"{root}model."
    draft.derive("sharding.impl", "fsdp2", (), "prime-rl calls fully_shard")
    key = f"{model}reshard_after_forward"
    fsdp2_strategy(draft, as_bool(draft.raw(key), True), key, World(), "as written, or true")
    draft.take("sharding.replicate_size", f"{model}dp_replicate", 1, as_int)
    flat_params(draft, "per_parameter", (), "FSDP2 keeps single parameters as DTensors")
    draft.derive("comm.prefetch_bwd", "pre", (), "FSDP2 gathers the next unit in backward")
    draft.derive("comm.grad_sync", "every_microbatch", (), "prime-rl never skips a reduction")
    for name in ("cp", "ep", "tp"):
        draft.take(f"parallel.{name}", f"{model}{name}", 1, as_int)
    _offload(draft, model)
    _recompute(draft, model)
    _precision(draft, model)
    _training(draft, root, model)
    return draft.finish()


def _switch(draft: Draft, key: str, default: bool) -> bool:
    """Return whether a switch, or a table that stands for one, is on."""
    return True if draft.section(f"{key}.") else as_bool(draft.raw(key), default)


def _offload(draft: Draft, model: str) -> None:
    whole = f"{model}fsdp_cpu_offload"
    optimizer, everything = f"{model}optim_cpu_offload", f"{model}full_offload"
    on = as_bool(draft.raw(whole))
    full = _switch(draft, everything, False)
    for name in ("params", "grads"):
        draft.put(f"offload.{name}", "cpu" if on else "none", whole)
    alone = as_bool(draft.raw(optimizer), not full)
    why = "not written: the optimizer is offloaded" if not draft.has(optimizer) else None
    place = "cpu" if on or full or alone else "none"
    draft.put("offload.optimizer", place, (whole, optimizer, everything), None if on else why)
    mode = "full" if full else "state" if alone and not on else "none"
    draft.put("offload.optimizer_mode", mode, (optimizer, everything, whole))


def _recompute(draft: Draft, model: str) -> None:
    ac, moved = f"{model}ac", f"{model}ac_offloading"
    on = _switch(draft, ac, True)
    word = str(draft.raw(f"{ac}.mode", default="full")).lower() if on else "none"
    why = None if draft.has(ac, f"{ac}.mode") else "not written: on, every layer"
    draft.put("recompute.mode", word, (ac, f"{ac}.mode"), why)
    draft.take("recompute.granularity", f"{ac}.freq", 1, as_int)
    if not on:
        draft.inert("recompute.granularity", "activation checkpointing is off")
    offloads = _switch(draft, moved, True)
    why = None if draft.has(moved) else "not written: on"
    draft.put("offload.activations", "cpu" if offloads else "none", moved, why)
    compiled = f"{model}compile"
    why = None if draft.has(compiled) else "not written: on"
    draft.put("compile.enabled", _switch(draft, compiled, True), compiled, why)


def _precision(draft: Draft, model: str) -> None:
    storage = f"{model}optimization_dtype"
    value = draft.take("precision.param_storage", storage, "float32", dtype)
    for name in ("grad", "optim_states"):
        draft.derive(f"precision.{name}", value, (storage,), "as the stored parameters")
    draft.take("precision.reduce", f"{model}reduce_dtype", "float32", dtype)
    draft.derive("precision.compute", "bfloat16", (), "prime-rl computes in bfloat16")


def _training(draft: Draft, root: str, model: str) -> None:
    for key, name in (
        ("batch.micro", f"{root}data.micro_batch_size"),
        ("batch.global", f"{root}data.batch_size"),
        ("batch.seq_len", f"{root}data.seq_len"),
    ):
        if draft.has(name):
            draft.take(key, name, None, as_int)
    if draft.has(f"{model}seq_len"):
        draft.take("batch.seq_len", f"{model}seq_len", None, as_int)
    draft.take("model.name", f"{model}name")
    draft.take("optimizer.kind", f"{root}optim.type", "adamw", optimizer_kind)
    draft.take("optimizer.learning_rate", f"{root}optim.lr", None, as_number)
    draft.take("optimizer.weight_decay", f"{root}optim.weight_decay", None, as_number)
    draft.take("optimizer.grad_clip", f"{root}optim.max_norm", 1.0, as_number)
