"""The rules of torch 2.6 - 2.14 (DDP, FSDP1, FSDP2): what a spec's fields come to; those of
Megatron for specs that train through it.

A field is inert when torch, in this config, never reads it or cannot act on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_doctor.config.megatron_native import resolve_megatron
from fsdp_doctor.config.resolvers.engines import resolve_ddp, resolve_fsdp1, resolve_fsdp2
from fsdp_doctor.config.resolvers.fields import Fields
from fsdp_doctor.config.resolvers.megatron_standalone import resolve_megatron_fsdp
from fsdp_doctor.config.schema import UNSET, leaf_values, present_sections, spec_keys
from fsdp_doctor.model.config import EffectiveConfig
from fsdp_doctor.model.spec import ProfileSpec

_ENGINES = {
    "ddp": resolve_ddp,
    "fsdp1": resolve_fsdp1,
    "fsdp2": resolve_fsdp2,
    "megatron_fsdp": resolve_megatron_fsdp,
}
_SECTIONS = (*_ENGINES, "megatron")
_TORCH_ONLY = ("precision", "activation_checkpointing", "optimizer", "compile")


def resolve_spec(
    spec: ProfileSpec, written: Mapping[str, str] | None = None, version: str | None = None
) -> EffectiveConfig:
    """Return the effective config of a spec.

    ``written`` maps the dotted keys that the file or an option holds to ``file`` or ``cli`` (see
    ``config.spec.WrittenSpec``); None: every key that differs from its default counts as written
    in the file. ``version`` is torch's, where known.
    """
    native = dict(leaf_values(spec))
    if written is None:
        written = {path: "file" for path, value in native.items() if _differs(path, value)}
        written |= dict.fromkeys(present_sections(spec), "file")
    fields = Fields(native, written)
    strategy = spec.config.strategy
    _workload(fields)
    if strategy == "megatron":
        _megatron(fields, spec, written)
    else:
        fields.take("sharding.impl", "config.strategy")
        _ENGINES[strategy](fields, spec)
        _training(fields)
        _optimizer(fields)
    for other in _SECTIONS:
        if other != strategy:
            fields.inert_section(
                f"config.{other}.", f"config.{other} is read with strategy: {other} only"
            )
    if native.get("checkpoint") is not None:
        fields.take("ckpt.format", "checkpoint")
    return EffectiveConfig(
        format="spec", framework="torch", version=version, fields=dict(fields.values)
    )


def _megatron(fields: Fields, spec: ProfileSpec, written: Mapping[str, str]) -> None:
    """What Megatron's own resolver makes of it; torch's sections have no effect."""
    for key, value in resolve_megatron(spec, written).items():
        fields.values[key] = value
    for section in _TORCH_ONLY:
        why = "Megatron's own sections say it: config.megatron"
        fields.inert_section(f"config.{section}", why)


def _differs(path: str, value: Any) -> bool:
    key = spec_keys().get(path)
    if key is None or key.default is UNSET:
        return True
    return value != key.default or type(value) is not type(key.default)


def _workload(fields: Fields) -> None:
    model = "workload.model"
    fields.take("name", "name")
    fields.take("world.size", "world_size")
    for name in ("layers", "hidden", "heads", "vocab", "tied_embeddings"):
        fields.take(f"model.{name}", f"{model}.{name}")
    _with_default(fields, "model.kv_heads", "heads", fields.native(f"{model}.heads"))
    _with_default(fields, "model.ffn", "hidden", 4 * fields.native(f"{model}.hidden"))
    for name in ("factory", "batch", "loss", "kwargs"):
        fields.take(f"model.{name}", f"{model}.{name}")
    if fields.native(f"{model}.factory") is not None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied_embeddings"):
            fields.inert(f"model.{name}", "workload.model.factory replaces the built-in GPT")
    fields.take("batch.micro", "workload.micro_batch")
    fields.take("batch.seq_len", "workload.sequence_length")
    fields.take("seed", "workload.seed")
    for name in ("warmup", "timed", "kernel_profile"):
        fields.take(f"steps.{name}", f"steps.{name}")


def _with_default(fields: Fields, key: str, base: str, default: int) -> None:
    path = f"workload.{key}"
    if fields.native(path) is not None:
        fields.take(key, path)
        return
    natives = (path, f"workload.model.{base}")
    fields.derive(key, default, natives, f"not given: from {natives[1]}")


def _training(fields: Fields) -> None:
    steps = "config.gradient_accumulation.steps"
    fields.take("batch.accumulation", steps)
    natives = ("workload.micro_batch", steps, "world_size")
    size = fields.native(natives[0]) * fields.native(natives[1]) * fields.native(natives[2])
    fields.derive("batch.global", size, natives, "micro batch x accumulation steps x ranks")
    fields.take("comm.grad_sync", "config.gradient_accumulation.sync")
    if fields.native(steps) == 1:
        fields.inert("comm.grad_sync", "one micro step: the first microbatch is also the last")
    _recompute(fields)
    autocast = "config.precision.autocast"
    fields.take("precision.autocast", autocast, fields.native(autocast) or "none")
    fields.take("precision.grad_scaler", "config.precision.grad_scaler")
    fields.take("compile.enabled", "config.compile")


def _recompute(fields: Fields) -> None:
    mode, every = (f"config.activation_checkpointing.{n}" for n in ("mode", "every_n"))
    value = fields.native(mode)
    if value == "every_n" and fields.native(every) == 1:
        fields.take("recompute.mode", mode, "full", also=(every,), reason="every block is full")
    else:
        fields.take("recompute.mode", mode)
    fields.take("recompute.granularity", every, reason="blocks per recomputed block")
    if value != "every_n":
        fields.inert("recompute.granularity", f"read with mode: every_n only, not {value}")


def _optimizer(fields: Fields) -> None:
    path = "config.optimizer"
    fields.take("optimizer.kind", f"{path}.name")
    reason = None
    if fields.native(f"{path}.implementation") == "default":
        reason = "torch decides: foreach when all parameters are on a GPU, for_loop on a CPU"
    fields.take("optimizer.implementation", f"{path}.implementation", reason=reason)
    fields.take("optimizer.learning_rate", f"{path}.learning_rate")
    fields.take("optimizer.weight_decay", f"{path}.weight_decay")
    fields.take("optimizer.momentum", f"{path}.momentum")
    if fields.native(f"{path}.name") == "adamw":
        fields.inert("optimizer.momentum", "AdamW has no momentum argument; SGD only")
    fields.take("optimizer.grad_clip", f"{path}.max_grad_norm")
    storage = "config.precision.parameters"
    fields.derive(
        "precision.optim_states",
        fields.native(storage),
        (storage,),
        "torch.optim keeps its state in the parameters' dtype",
    )
