"""LLaMA-Factory: v0 hands everything to the HF Trainer, v1 shards by itself.

Source: LLaMA-Factory ff6d4d12 (2026-08-18), src/llamafactory/v1/plugins/trainer_plugins.
"""

from __future__ import annotations

from fsdp_doctor.config.resolvers import hf
from fsdp_doctor.config.resolvers.draft import Draft
from fsdp_doctor.config.resolvers.engines_native import (
    World,
    ddp_strategy,
    fsdp2_strategy,
    mixed,
    offload_with_shards,
)
from fsdp_doctor.config.resolvers.words import as_bool, as_int, as_number
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("llama-factory",)
ASSUMED: dict[str, str] = {"llama-factory": hf.ASSUMED["hf-trainer"]}
VERSIONS: dict[str, tuple[str, ...]] = {"llama-factory": hf.VERSIONS["hf-trainer"]}
_BLOCK = "dist_config."


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of a LLaMA-Factory YAML."""
    draft = Draft(native, version)
    if draft.section(_BLOCK):
        _first(draft)
        return draft.finish()
    hf.trainer(draft, version)
    draft.take("batch.seq_len", "cutoff_len", 2048, as_int)
    draft.take("batch.packing", "packing", False, as_bool)
    draft.take("model.finetuning", "finetuning_type", "lora", str)
    draft.take("model.lora_rank", "lora_rank", 8, as_int)
    if draft.values["model.finetuning"].value != "lora":
        draft.inert("model.lora_rank", "finetuning_type is not lora")
    draft.take("model.quantization_bits", "quantization_bit", None, as_int)
    if draft.has("fp8"):
        draft.take("precision.fp8", "fp8", False, as_bool)
    return draft.finish("the Trainer does not read this key")


def _first(draft: Draft) -> None:
    """Set the fields of v1."""
    draft.take("model.name", "model")
    name = str(draft.raw(f"{_BLOCK}name", default="ddp")).lower()
    draft.take("batch.micro", "micro_batch_size", 1, as_int)
    draft.take("batch.seq_len", "cutoff_len", None, as_int)
    draft.take("optimizer.learning_rate", "learning_rate", None, as_number)
    draft.put("sharding.impl", name, f"{_BLOCK}name")
    if name == "fsdp2":
        key = f"{_BLOCK}reshard_after_forward"
        reshard = as_bool(draft.raw(key), True)
        fsdp2_strategy(draft, reshard, key, World(), "as written, or true")
        moved = f"{_BLOCK}offload_params"
        offload_with_shards(draft, moved, as_bool(draft.raw(moved)))
        draft.take("offload.pin_memory", f"{_BLOCK}pin_memory", True, as_bool)
        if not as_bool(draft.raw(moved)):
            draft.inert("offload.pin_memory", "nothing is offloaded")
        precision = f"{_BLOCK}mixed_precision"
        written = str(draft.raw(precision, default="bf16")).lower()
        mixed(draft, "float16" if written == "fp16" else "bfloat16", precision)
    elif name == "ddp":
        ddp_strategy(draft, f"{_BLOCK}name", World())
