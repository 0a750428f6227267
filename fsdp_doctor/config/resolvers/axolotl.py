"""axolotl: a layer over the HF Trainer and accelerate's environment variables.

Source: axolotl/utils/schemas/fsdp.py, utils/trainer.py (setup_fsdp_envs),
core/builders/causal.py (main of 2026-07, and v0.13).
"""

from __future__ import annotations

from fsdp_doctor.config.resolvers import hf
from fsdp_doctor.config.resolvers.accelerate import add_part, deepspeed_prefix
from fsdp_doctor.config.resolvers.draft import Draft
from fsdp_doctor.config.resolvers.engines_native import (
    World,
    bucket_bytes,
    ddp_strategy,
    flat_params,
    mixed,
)
from fsdp_doctor.config.resolvers.fsdp_plugin import Plugin, apply
from fsdp_doctor.config.resolvers.hf_fsdp import FsdpWords
from fsdp_doctor.config.resolvers.words import (
    as_bool,
    as_int,
    as_number,
    optimizer_bits,
    optimizer_kind,
)
from fsdp_doctor.config.versions import at_least, version_for
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("axolotl",)
ASSUMED: dict[str, str] = {"axolotl": "0.17"}
VERSIONS: dict[str, tuple[str, ...]] = {"axolotl": ("0.13", "0.17")}
_VERSION = ("fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version")
_PARALLEL = {
    "parallel.tp": "tensor_parallel_size",
    "parallel.cp": "context_parallel_size",
    "sharding.replicate_size": "dp_replicate_size",
    "sharding.shard_size": "dp_shard_size",
}


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of an axolotl YAML."""
    draft = Draft(native, version)
    add_part(draft)
    _batch(draft)
    _optimizer(draft)
    hf.recompute(draft)
    if draft.has("activation_offloading"):
        moved = str(draft.raw("activation_offloading")).lower()
        place = "none" if moved in ("false", "none") else "cpu"
        draft.put("offload.activations", place, "activation_offloading")
    draft.take("compile.enabled", "torch_compile", False, as_bool)
    for key, name in (("batch.packing", "sample_packing"), ("kernels.use_kernels", "use_kernels")):
        draft.take(key, name, False, as_bool)
    draft.take("model.name", "base_model")
    draft.take("model.finetuning", "adapter", "full", str)
    draft.take("model.lora_rank", "lora_r", None, as_int)
    bits = ("load_in_4bit", "load_in_8bit")
    loaded = [size for size, name in zip((4, 8), bits, strict=True) if as_bool(draft.raw(name))]
    draft.put("model.quantization_bits", loaded[0] if loaded else None, bits)
    draft.take("batch.pad_to_sequence_len", "pad_to_sequence_len", None, as_bool)
    prefix = deepspeed_prefix(draft, "deepspeed.")
    if draft.has("deepspeed") or draft.section(prefix):
        hf.with_deepspeed(draft, prefix)
    elif draft.section("fsdp_config.") or FsdpWords.read(draft).on or draft.has("fsdp_version"):
        _fsdp(draft, version)
        hf.grad_sync(draft)
    else:
        _ddp(draft)
    return draft.finish("axolotl's schema does not have this key: dropped")


def _batch(draft: Draft) -> None:
    draft.take("batch.micro", "micro_batch_size", 1, as_int)
    draft.take("batch.accumulation", "gradient_accumulation_steps", 1, as_int)
    draft.take("batch.seq_len", "sequence_len", 512, as_int)


def _optimizer(draft: Draft) -> None:
    name = str(draft.raw("optimizer", default="adamw_torch_fused")).lower()
    draft.put("optimizer.kind", _kind(name), "optimizer")
    draft.derive("optimizer.bits", optimizer_bits(name), ("optimizer",), "by its name")
    draft.derive("optimizer.fused", name.endswith("fused"), ("optimizer",), "by its name")
    draft.take("optimizer.grad_clip", "max_grad_norm", 1.0, as_number)
    draft.take("optimizer.learning_rate", "learning_rate", None, as_number)
    draft.take("optimizer.weight_decay", "weight_decay", 0.0, as_number)


def _kind(name: str) -> str:
    return "adamw_8bit" if name in ("adamw_torch_8bit", "ao_adamw_8bit") else optimizer_kind(name)


def _fsdp(draft: Draft, version: str | None) -> None:
    number = as_int(draft.raw(*_VERSION), 1) or 1
    words = FsdpWords.read(draft)
    draft.claim("fsdp")
    if draft.has("fsdp"):
        draft.drop(("fsdp",), "deprecated list: fsdp_config alone decides")
    exported = _only_truthy(draft, version)
    reshard_keys: tuple[str, ...] = (
        "fsdp_config.reshard_after_forward",
        "fsdp_config.fsdp_reshard_after_forward",
    )
    reshard = as_bool(draft.raw(*reshard_keys), True)
    reason = "as written, or accelerate's true"
    if exported and not reshard:
        why = "only true values reach accelerate's environment; its default true holds"
        draft.drop(reshard_keys, why)
        reshard, reason, reshard_keys = True, why, ()
    keys = ("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params")
    offloads = as_bool(draft.raw(*keys)) or "offload" in words.words
    plugin = Plugin(
        strategy="FULL_SHARD",
        strategy_natives=("fsdp_config.sharding_strategy", "fsdp_config.fsdp_sharding_strategy"),
        strategy_reason="axolotl passes no strategy on: FULL_SHARD",
        reshard=reshard,
        reshard_natives=reshard_keys,
        reshard_reason=reason,
        offload=offloads,
        offload_natives=keys,
        version_natives=_VERSION,
        defaults={"sync_module_states": False, "use_orig_params": False},
    )
    _dropped(draft)
    apply(draft, plugin, number)
    _dropped(draft)
    _sizes(draft)
    _precision(draft, sharded=True)
    if offloads:
        pin = ("fsdp_config.cpu_offload_pin_memory", "fsdp_config.fsdp_cpu_offload_pin_memory")
        draft.take("offload.pin_memory", pin, True, as_bool)
    else:
        pin = ("fsdp_config.cpu_offload_pin_memory", "fsdp_config.fsdp_cpu_offload_pin_memory")
        draft.drop(pin, "nothing is offloaded")


def _only_truthy(draft: Draft, version: str | None) -> bool:
    """Return whether falsy values are lost: by way of the environment, on transformers 4."""
    transformers = version_for("transformers", {}, draft.native.packages)
    if transformers is not None:
        return hf.is_before_5(transformers)
    return not at_least(version, "0.14")


def _dropped(draft: Draft) -> None:
    """List what the schema lacks: it has no field, so nothing passes it on."""
    for key in ("sharding_strategy", "limit_all_gathers", "backward_prefetch", "forward_prefetch"):
        names = (f"fsdp_config.{key}", f"fsdp_config.fsdp_{key}")
        draft.drop(names, "axolotl's schema does not have this key: dropped")
        for name in names:
            draft.fields.pop(name, None)


def _sizes(draft: Draft) -> None:
    for key, name in _PARALLEL.items():
        if draft.has(name):
            draft.take(key, name, None, as_int)


def _precision(draft: Draft, *, sharded: bool) -> None:
    name = hf.precision_name(draft)
    if name is not None and sharded:
        mixed(draft, name, ("bf16", "fp16"))
    elif sharded:
        why = "no mixed precision: as the model was loaded"
        draft.put("precision.compute", None, ("bf16", "fp16"), why)
    else:
        draft.put("precision.autocast", name or "none", ("bf16", "fp16"))
    if draft.has("fp8"):
        draft.take("precision.fp8", "fp8", False, as_bool)


def _ddp(draft: Draft) -> None:
    natives = ("fsdp_config", "fsdp", "deepspeed")
    draft.put("sharding.impl", "ddp", natives, "neither fsdp nor deepspeed")
    ddp_strategy(draft, natives, World())
    flat_params(draft, "per_parameter", (), "DDP keeps single parameters")
    draft.take(
        "comm.bucket_bytes",
        "ddp_bucket_cap_mb",
        bucket_bytes(None),
        lambda value: bucket_bytes(as_number(value)),
    )
    _precision(draft, sharded=False)
