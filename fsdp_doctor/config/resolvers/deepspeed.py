"""DeepSpeed's own rules: ZeRO stages, offload, buckets, precision, batch; and HF's ``auto``.

Source: deepspeed/runtime/zero/config.py, zero/offload_config.py, precision_config.py, constants.py
(0.19.8); transformers/integrations/deepspeed.py (5.24) for ``auto``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fsdp_doctor.config.resolvers.deepspeed_rules import (
    ZeroKeys,
    buckets,
    drop_other_stages,
    offload,
)
from fsdp_doctor.config.resolvers.draft import HIDDEN, Draft
from fsdp_doctor.config.resolvers.words import (
    as_bool,
    as_int,
    as_number,
    dtype,
    number_or_word,
    optimizer_bits,
    optimizer_kind,
)
from fsdp_doctor.config.versions import at_least
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("deepspeed",)
ASSUMED: dict[str, str] = {"deepspeed": "0.19.8"}
VERSIONS: dict[str, tuple[str, ...]] = {"deepspeed": ("0.18.0", "0.19.3", "0.19.8")}
STRATEGIES = ("none", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """What stands around DeepSpeed: where its keys are, and what ``auto`` becomes."""

    prefix: str = ""
    """Before DeepSpeed's keys among the native ones."""
    inline: dict[str, str] = field(default_factory=dict)
    """DeepSpeed key -> another native key that means the same (accelerate's own names)."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed key -> default of the launcher, where it is not DeepSpeed's."""
    auto: dict[str, Any] = field(default_factory=dict)
    """DeepSpeed key -> what the launcher fills in for ``auto``."""
    hidden: int | None = None
    reason: str | None = None
    """Why DeepSpeed runs, in the launcher's words."""


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of a DeepSpeed JSON."""
    draft = Draft(native, version)
    hidden = as_int(draft.raw(HIDDEN))
    apply(draft, version, Launcher(hidden=hidden))
    return draft.finish("DeepSpeed does not know this key")


def apply(draft: Draft, version: str | None, launcher: Launcher) -> None:
    """Set the fields that DeepSpeed decides on."""
    keys = Keys(draft, launcher)
    stage = _stage(keys)
    draft.put("sharding.impl", "deepspeed", keys.names("zero_optimization.stage"), launcher.reason)
    draft.put(
        "sharding.strategy",
        STRATEGIES[stage],
        keys.names("zero_optimization.stage"),
        f"ZeRO stage {stage}",
    )
    half = _precision(keys, stage, version)
    buckets(keys, stage, 2 if half else 4)
    offload(keys, stage, version)
    _partitions(keys, stage)
    _batch(keys, stage)
    _optimizer(keys, version)
    _checkpointing(keys)
    drop_other_stages(keys, stage)


def without_file(draft: Draft, natives: tuple[str, ...], compute: str, reason: str) -> None:
    """Set what is known when DeepSpeed's JSON is not here: not the stage, not what it offloads."""
    draft.put("sharding.impl", "deepspeed", natives, reason)
    why = "it stands in the DeepSpeed JSON, which is not here"
    draft.derive("sharding.strategy", None, natives, why)
    draft.derive("precision.compute", compute, (), "the launcher's mixed precision")
    draft.notes.append("the DeepSpeed JSON is not here: give it as CONFIG+FILE")


class Keys(ZeroKeys):
    """DeepSpeed's keys among native ones, with the launcher's names and ``auto`` filled in."""

    def __init__(self, draft: Draft, launcher: Launcher) -> None:
        self.draft = draft
        self.launcher = launcher

    @property
    def hidden(self) -> int | None:
        """The model's hidden size, where it is known."""
        return self.launcher.hidden

    def names(self, *keys: str) -> tuple[str, ...]:
        """Return the native names of DeepSpeed keys, the first one first."""
        found = []
        for key in keys:
            found.append(f"{self.launcher.prefix}{key}")
            if key in self.launcher.inline:
                found.append(self.launcher.inline[key])
        return tuple(found)

    def value(self, *keys: str, default: Any = None) -> Any:
        """Return what a key comes to: written, filled in for ``auto``, or a default."""
        raw = self.draft.raw(*self.names(*keys))
        if raw == "auto":
            return self.launcher.auto.get(keys[0], "auto")
        if raw is None:
            return self.launcher.defaults.get(keys[0], default)
        return raw

    def put(self, key: str, value: Any, *keys: str, reason: str | None = None) -> None:
        """Set a canonical field from DeepSpeed keys."""
        if reason is None and self.draft.raw(*self.names(*keys)) == "auto" and value != "auto":
            reason = "auto: filled in by the launcher"
        self.draft.put(key, value, self.names(*keys), reason)


def _stage(keys: Keys) -> int:
    stage = as_int(keys.value("zero_optimization.stage"), 0) or 0
    return min(max(stage, 0), 3)


def _precision(keys: Keys, stage: int, version: str | None) -> bool:
    """Set dtypes; return whether elements have two bytes."""
    bf16 = keys.value("bf16.enabled", "bfloat16.enabled", default=False)
    fp16 = keys.value("fp16.enabled", default=False)
    names = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
    word = "auto" if "auto" in (bf16, fp16) else None
    if word is None or as_bool(bf16) or as_bool(fp16):
        word = "bfloat16" if as_bool(bf16) else "float16" if as_bool(fp16) else "float32"
    reason = "auto: the launcher's mixed precision" if word == "auto" else None
    keys.put("precision.compute", word, *names, reason=reason)
    natives = keys.names(*names)
    draft = keys.draft
    draft.derive("precision.param_storage", word, natives, "parameters are stored as computed")
    draft.derive("precision.optim_states", "float32", natives, "state belongs to fp32 copies")
    if word != "float32":
        why = "the optimizer steps on an fp32 copy"
        draft.derive("precision.master", "float32", natives, f"{why}, sharded" if stage else why)
    accumulate = dtype(keys.value("data_types.grad_accum_dtype"))
    keys.put("precision.grad", accumulate or word, "data_types.grad_accum_dtype", *names)
    communicate = dtype(keys.value("communication_data_type"))
    keys.put("precision.reduce", communicate or word, "communication_data_type", *names)
    if as_bool(bf16) or bf16 == "auto":
        checks = at_least(version, "0.19.3")
        key = "bf16.check_grad_overflow"
        keys.put("precision.bf16_check_overflow", as_bool(keys.value(key, default=checks)), key)
    else:
        keys.draft.drop(keys.names("bf16.check_grad_overflow"), "read with bf16 only")
    keys.draft.claim(*keys.names("bf16.enabled", "fp16.enabled"))
    if not as_bool(fp16) and fp16 != "auto":
        keys.draft.drop_section(f"{keys.launcher.prefix}fp16.", "read with fp16 only")
    return word != "float32"


def _partitions(keys: Keys, stage: int) -> None:
    zero = "zero_optimization."
    for key, name, default in (
        ("sharding.secondary_partition", "zero_hpz_partition_size", 1),
        ("sharding.mics_shard_size", "mics_shard_size", -1),
    ):
        value = as_int(keys.value(zero + name), default)
        keys.put(key, value, zero + name)
        if stage < 3:
            keys.draft.inert(key, f"read at stage 3 only, this is stage {stage}")
    for key, name in (
        ("comm.quantized_weights", "zero_quantized_weights"),
        ("comm.quantized_gradients", "zero_quantized_gradients"),
    ):
        keys.put(key, as_bool(keys.value(zero + name)), zero + name)
        if stage < 3:
            keys.draft.inert(key, f"read at stage 3 only, this is stage {stage}")
    overlap = keys.value(zero + "overlap_comm")
    value = stage == 3 if overlap is None else as_bool(overlap)
    reason = f"not written: {str(value).lower()} at stage {stage}" if overlap is None else None
    keys.put("comm.overlap_grad_reduce", value, zero + "overlap_comm", reason=reason)
    contiguous = as_bool(keys.value(zero + "contiguous_gradients", default=True))
    keys.put("comm.contiguous_gradients", contiguous, zero + "contiguous_gradients")
    keys.put(
        "ckpt.gather_16bit",
        keys.value(
            zero + "stage3_gather_16bit_weights_on_model_save",
            zero + "gather_16bit_weights_on_model_save",
            zero + "stage3_gather_fp16_weights_on_model_save",
            default=False,
        ),
        zero + "stage3_gather_16bit_weights_on_model_save",
        zero + "gather_16bit_weights_on_model_save",
        zero + "stage3_gather_fp16_weights_on_model_save",
    )
    if stage < 3 and keys.draft.values["ckpt.gather_16bit"].source != "default":
        keys.draft.inert("ckpt.gather_16bit", f"read at stage 3 only, this is stage {stage}")
    if stage == 0:
        for key in ("comm.overlap_grad_reduce", "comm.contiguous_gradients"):
            keys.draft.inert(key, "ZeRO is off at stage 0")


def _batch(keys: Keys, stage: int) -> None:
    for key, name, default in (
        ("batch.micro", "train_micro_batch_size_per_gpu", None),
        ("batch.accumulation", "gradient_accumulation_steps", 1),
        ("batch.global", "train_batch_size", None),
    ):
        keys.put(key, number_or_word(keys.value(name, default=default)), name)
    _derived_batch(keys)
    steps = keys.names("gradient_accumulation_steps")
    each = "every_microbatch" if stage >= 2 else "last_microbatch"
    keys.draft.derive("comm.grad_sync", each, steps, f"ZeRO stage {stage} reduces so")
    if keys.draft.values["batch.accumulation"].value == 1:
        keys.draft.inert("comm.grad_sync", "one micro step: the first is also the last")


def _derived_batch(keys: Keys) -> None:
    values = keys.draft.values
    micro, total = values["batch.micro"].value, values["batch.global"].value
    if micro is None and isinstance(total, int):
        why = "not written: train_batch_size / (accumulation x ranks)"
        keys.draft.derive("batch.micro", None, keys.names("train_batch_size"), why)


def _optimizer(keys: Keys, version: str | None) -> None:
    default = 1.0 if at_least(version, "0.19.3") else 0.0
    clip = number_or_word(keys.value("gradient_clipping", default=default))
    reason = None
    if keys.draft.raw(*keys.names("gradient_clipping")) is None:
        reason = f"not written: {default} in DeepSpeed {version}"
    value = float(clip) if isinstance(clip, (int, float)) else clip
    keys.put("optimizer.grad_clip", value, "gradient_clipping", reason=reason)
    name = keys.value("optimizer.type")
    if name is not None:
        keys.put("optimizer.kind", optimizer_kind(name), "optimizer.type")
        natives = keys.names("optimizer.type")
        keys.draft.derive("optimizer.bits", optimizer_bits(name), natives, "by its name")
    rate = keys.names("optimizer.params.lr")
    if keys.draft.has(*rate):
        keys.draft.take("optimizer.learning_rate", rate, None, number_or_word)


def _checkpointing(keys: Keys) -> None:
    prefix = f"{keys.launcher.prefix}activation_checkpointing."
    why = "acts only where the model calls DeepSpeed's own checkpointing"
    if keys.draft.section(prefix):
        for key, name in (
            ("recompute.partition_activations", "partition_activations"),
            ("offload.activations", "cpu_checkpointing"),
        ):
            on = as_bool(keys.value(f"activation_checkpointing.{name}"))
            value: Any = ("cpu" if on else "none") if key == "offload.activations" else on
            keys.put(key, value, f"activation_checkpointing.{name}", reason=why)
        count = keys.names("activation_checkpointing.number_checkpoints")
        keys.draft.take("recompute.granularity", count, None, as_number)
