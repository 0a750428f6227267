"""Lightning's strategy strings, ``precision`` words, and its defaults for DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_doctor.config.resolvers.draft import Draft
from fsdp_doctor.config.resolvers.words import class_name
from fsdp_doctor.config.versions import at_least

_CLASSES = {
    "FSDPStrategy": "fsdp",
    "ModelParallelStrategy": "fsdp2",
    "DDPStrategy": "ddp",
    "DeepSpeedStrategy": "deepspeed",
    "SingleDeviceStrategy": "none",
}
_DEEPSPEED = {
    "zero_optimization.stage": ("stage", 2),
    "zero_optimization.contiguous_gradients": ("contiguous_gradients", True),
    "zero_optimization.overlap_comm": ("overlap_comm", True),
    "zero_optimization.allgather_partitions": ("allgather_partitions", True),
    "zero_optimization.reduce_scatter": ("reduce_scatter", True),
    "zero_optimization.allgather_bucket_size": ("allgather_bucket_size", 200_000_000),
    "zero_optimization.reduce_bucket_size": ("reduce_bucket_size", 200_000_000),
    "zero_optimization.sub_group_size": ("sub_group_size", 1_000_000_000_000),
    "zero_optimization.offload_optimizer.pin_memory": ("pin_memory", False),
    "activation_checkpointing.partition_activations": ("partition_activations", False),
    "activation_checkpointing.cpu_checkpointing": ("cpu_checkpointing", False),
}
"""DeepSpeed key -> argument of ``DeepSpeedStrategy`` and its default (2.6.6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Which engine a ``strategy`` stands for."""

    kind: str
    """fsdp, fsdp2, ddp, deepspeed, none, or the word itself."""
    word: str
    names: tuple[str, ...]
    """Native keys that say so."""
    arguments: str
    """Before the keys of the strategy's own arguments."""
    stage: int | None = None
    offload: bool = False
    offload_params: bool = False
    nvme: bool = False
    find_unused: bool = False


def strategy_of(draft: Draft, root: str) -> Strategy:
    """Return the strategy: a word, ``class_path``/``init_args``, or Hydra's ``_target_``."""
    key = f"{root}strategy"
    path = draft.find(f"{key}.class_path")
    if path is not None:
        return _by_class(draft, path, f"{key}.init_args.")
    target = draft.find(f"{key}._target_")
    if target is not None:
        return _by_class(draft, target, f"{key}.")
    word = str(draft.raw(key, default="fsdp" if _is_litgpt(draft) else "auto")).lower()
    return _by_word(word, key)


def _is_litgpt(draft: Draft) -> bool:
    return bool(draft.section("train."))


def _by_class(draft: Draft, key: str, arguments: str) -> Strategy:
    name = class_name(draft.raw(key))
    return Strategy(kind=_CLASSES.get(name, name), word=name, names=(key,), arguments=arguments)


def _by_word(word: str, key: str) -> Strategy:
    arguments = f"{key}."
    if word.startswith("deepspeed"):
        parts = word.split("_")
        stage = next((int(part) for part in parts if part.isdigit()), 2)
        return Strategy(
            kind="deepspeed",
            word=word,
            names=(key,),
            arguments=arguments,
            stage=stage,
            offload="offload" in parts,
            offload_params="offload" in parts and stage == 3,
            nvme="nvme" in parts,
        )
    if word.startswith("fsdp"):
        offload = word == "fsdp_cpu_offload"
        return Strategy(kind="fsdp", word=word, names=(key,), arguments=arguments, offload=offload)
    if word.startswith("ddp"):
        unused = "find_unused_parameters_true" in word
        return Strategy(
            kind="ddp", word=word, names=(key,), arguments=arguments, find_unused=unused
        )
    return Strategy(kind=word, word=word, names=(key,), arguments=arguments)


def deepspeed_defaults(arguments: str, strategy: Strategy) -> tuple[dict[str, Any], dict[str, str]]:
    """Return Lightning's defaults by DeepSpeed key, and its argument names by DeepSpeed key."""
    defaults: dict[str, Any] = {key: default for key, (_, default) in _DEEPSPEED.items()}
    inline = {key: f"{arguments}{name}" for key, (name, _) in _DEEPSPEED.items()}
    place = "nvme" if strategy.nvme else "cpu"
    if strategy.stage is not None:
        defaults["zero_optimization.stage"] = strategy.stage
        inline["zero_optimization.stage"] = strategy.names[0]
        defaults["zero_optimization.offload_optimizer.device"] = (
            place if strategy.offload else "none"
        )
        if strategy.offload_params:
            defaults["zero_optimization.offload_param.device"] = place
        del inline["zero_optimization.stage"]
    return defaults, inline


_WORDS: dict[str, tuple[str, str, str]] = {
    # word: storage, compute, kind
    "32-true": ("float32", "float32", "true"),
    "64-true": ("float64", "float64", "true"),
    "bf16-true": ("bfloat16", "bfloat16", "true"),
    "16-true": ("float16", "float16", "true"),
    "bf16-mixed": ("float32", "bfloat16", "mixed"),
    "16-mixed": ("float32", "float16", "mixed"),
}
_ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def precision(draft: Draft, root: str, *, sharded: bool) -> None:
    """Set dtypes from ``precision``; FSDP has a policy for it, the others autocast."""
    key = f"{root}precision"
    word = str(draft.raw(key, default="32-true")).lower()
    word = _ALIASES.get(word, word)
    storage, compute, kind = _WORDS.get(word, ("float32", "float32", "true"))
    draft.put("precision.param_storage", storage, key, f"precision: {word}")
    for name in ("grad", "optim_states"):
        draft.derive(f"precision.{name}", storage, (key,), "as the stored parameters")
    if sharded:
        gathered = compute
        if kind == "mixed" and not at_least(draft.version, "2.6"):
            gathered = "float32"  # param_dtype became the low dtype in 2.6.0
            draft.derive("precision.autocast", compute, (key,), "gathered in float32, autocast")
        draft.put("precision.compute", gathered, key, f"precision: {word}")
        draft.derive("precision.reduce", compute, (key,), "the low dtype")
        draft.derive("precision.buffer", compute, (key,), "as computed")
    else:
        draft.put("precision.autocast", compute if kind == "mixed" else "none", key)
        if kind == "true":
            draft.derive("precision.compute", compute, (key,), "as stored")
