"""The HF Trainer: ``TrainingArguments`` of transformers 4.46 to 5.24.

Source: transformers/training_args.py (_process_fsdp_args, _apply_legacy_fsdp_to_config),
trainer.py, integrations/deepspeed.py (5.24; wheels 4.46 to 5.16 for what changed between them).
"""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.resolvers import deepspeed
from fsdp_doctor.config.resolvers.accelerate import (
    add_part,
    deepspeed_prefix,
    deepspeed_version,
)
from fsdp_doctor.config.resolvers.draft import HIDDEN, Draft
from fsdp_doctor.config.resolvers.engines_native import World, bucket_bytes, ddp_strategy, mixed
from fsdp_doctor.config.resolvers.hf_fsdp import FsdpWords, fsdp
from fsdp_doctor.config.resolvers.words import (
    as_bool,
    as_int,
    as_number,
    optimizer_bits,
    optimizer_kind,
)
from fsdp_doctor.config.versions import at_least
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("hf-trainer",)
ASSUMED: dict[str, str] = {"hf-trainer": "5.24.0"}
VERSIONS: dict[str, tuple[str, ...]] = {"hf-trainer": ("4.57.1", "5.0.0", "5.9.0", "5.24.0")}
_DDP = ("ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_static_graph")


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of HF TrainingArguments."""
    draft = Draft(native, version)
    trainer(draft, version)
    return draft.finish("the Trainer does not read this key")


def trainer(draft: Draft, version: str | None) -> None:
    """Set all that the Trainer decides on."""
    add_part(draft)
    prefix = deepspeed_prefix(draft, "deepspeed.")
    recompute(draft)
    batch(draft)
    optimizer(draft)
    words = FsdpWords.read(draft)
    if draft.section(prefix) or draft.has("deepspeed"):
        with_deepspeed(draft, prefix)
        draft.drop(("fsdp",), "DeepSpeed runs instead")
        draft.drop_section("fsdp_config", "DeepSpeed runs instead")
    elif words.on:
        fsdp(draft, version, words)
        _fsdp_precision(draft)
        grad_sync(draft)
    else:
        _ddp(draft)
        draft.drop_section("fsdp_config", "fsdp is not switched on")
    if draft.values["sharding.impl"].value != "ddp":
        draft.drop(_DDP, "read with DistributedDataParallel only")
    draft.take("compile.enabled", "torch_compile", False, as_bool)
    if draft.has("model_name_or_path"):
        draft.take("model.name", "model_name_or_path")


def recompute(draft: Draft) -> None:
    """Set recomputation of whole layers from the Trainer's own switch."""
    names = ("gradient_checkpointing", "activation_checkpointing")
    on = as_bool(draft.raw(*names))
    kwargs = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
    every, offload, reentrant = (
        tuple(f"{name}.{key}" for name in kwargs)
        for key in ("every_n_layers", "offload", "use_reentrant")
    )
    step = (as_int(draft.raw(*every)) if draft.has(*every) else None) or 1
    mode = "every_n" if step > 1 else "full"
    draft.put("recompute.mode", mode if on else "none", (*names, *every))
    for field, found, read in (
        ("recompute.granularity", every, as_int),
        ("offload.activations", offload, as_bool),
        ("recompute.reentrant", reentrant, as_bool),
    ):
        if draft.has(*found):
            draft.take(field, found, None, read)
            if not on:
                draft.inert(field, "gradient checkpointing is off")


def batch(draft: Draft) -> None:
    """Set batch sizes."""
    draft.take("batch.micro", "per_device_train_batch_size", 8, as_int)
    draft.take("batch.accumulation", "gradient_accumulation_steps", 1, as_int)
    names = ("max_length", "max_seq_length", "model_max_length")
    if draft.has(*names):
        draft.take("batch.seq_len", names, None, as_int)


def grad_sync(draft: Draft) -> None:
    """Set when gradients are reduced: all but the last microbatch skip it, unless asked not to."""
    key = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
    each = as_bool(draft.raw(key))
    several = (draft.values["batch.accumulation"].value or 1) > 1
    value = "last_microbatch" if several and not each else "every_microbatch"
    why = "the Trainer skips reduction in all but the last microbatch"
    draft.put("comm.grad_sync", value, key, why if several else "one microbatch")


def optimizer(draft: Draft) -> None:
    """Set the optimizer's kind, state and clipping."""
    name = str(draft.raw("optim", default="adamw_torch_fused"))
    name = name.rpartition(".")[2].lower()
    draft.put("optimizer.kind", optimizer_kind(name), "optim")
    draft.derive("optimizer.bits", optimizer_bits(name), ("optim",), "by its name")
    draft.derive("optimizer.fused", name.endswith("fused"), ("optim",), "by its name")
    draft.take("optimizer.grad_clip", "max_grad_norm", 1.0, as_number)
    draft.take("optimizer.learning_rate", "learning_rate", 5e-5, as_number)
    draft.take("optimizer.weight_decay", "weight_decay", 0.0, as_number)


def precision_name(draft: Draft) -> str | None:
    """Return the dtype of the Trainer's mixed precision; None without."""
    if as_bool(draft.raw("bf16")) or str(draft.raw("bf16")).lower() == "auto":
        return "bfloat16"
    return "float16" if as_bool(draft.raw("fp16")) else None


def _fsdp_precision(draft: Draft) -> None:
    name = precision_name(draft)
    if name is not None:
        mixed(draft, name, ("bf16", "fp16"))
    else:
        why = "no mixed precision: as the model was loaded"
        draft.put("precision.compute", None, ("bf16", "fp16"), why)


def _ddp(draft: Draft) -> None:
    draft.put("sharding.impl", "ddp", ("fsdp",), "neither fsdp nor deepspeed")
    ddp_strategy(draft, ("fsdp",), World())
    draft.put("precision.autocast", precision_name(draft) or "none", ("bf16", "fp16"))
    draft.take(
        "comm.bucket_bytes",
        "ddp_bucket_cap_mb",
        bucket_bytes(None),
        lambda value: bucket_bytes(as_number(value)),
        reason="not written: torch's default of 25 MiB",
    )
    draft.take("ddp.find_unused_parameters", "ddp_find_unused_parameters", False, as_bool)
    draft.take("ddp.static_graph", "ddp_static_graph", False, as_bool)
    several = (draft.values["batch.accumulation"].value or 1) > 1
    draft.derive(
        "comm.grad_sync",
        "last_microbatch",
        ("gradient_accumulation_steps",),
        "the Trainer skips reduction in all but the last microbatch",
    )
    if not several:
        draft.inert("comm.grad_sync", "one micro step: the first is also the last")


def with_deepspeed(draft: Draft, prefix: str) -> None:
    """Set what DeepSpeed decides on, with ``auto`` filled in as the Trainer does."""
    name = precision_name(draft)
    if not draft.section(prefix):
        natives = ("deepspeed", "bf16", "fp16")
        deepspeed.without_file(draft, natives, name or "float32", "deepspeed is given")
        return
    values = draft.values
    auto: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": values["batch.micro"].value,
        "gradient_accumulation_steps": values["batch.accumulation"].value,
        "gradient_clipping": values["optimizer.grad_clip"].value,
        "bf16.enabled": name == "bfloat16",
        "fp16.enabled": name == "float16",
        "optimizer.params.lr": values["optimizer.learning_rate"].value,
    }
    own = {key: values[key] for key in ("batch.micro", "batch.accumulation", "optimizer.grad_clip")}
    launcher = deepspeed.Launcher(
        prefix=prefix, auto=auto, hidden=as_int(draft.raw(HIDDEN)), reason="deepspeed is given"
    )
    deepspeed.apply(draft, deepspeed_version(draft), launcher)
    names = ("bf16", "fp16", f"{prefix}bf16.enabled", f"{prefix}fp16.enabled")
    draft.put("precision.compute", draft.values["precision.compute"].value, names)
    stage = f"{prefix}zero_optimization.stage"
    draft.put("sharding.impl", "deepspeed", ("deepspeed", stage), launcher.reason)
    for key, value in own.items():
        if draft.values[key].written in ("auto", None):
            draft.values[key] = value
    draft.values.setdefault("optimizer.kind", values["optimizer.kind"])


def is_before_5(version: str | None) -> bool:
    """Return whether transformers is of the 4 series."""
    return version is not None and not at_least(version, "5.0")
