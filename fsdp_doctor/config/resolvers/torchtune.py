"""torchtune's distributed recipes: FSDP2 through ``shard_model``.

Source: torchtune bd2a0fc7 (2026-04-23): recipes/full_finetune_distributed.py,
torchtune/training/_distributed.py, _compile.py.
"""

from __future__ import annotations

from fsdp_doctor.config.resolvers.draft import Draft
from fsdp_doctor.config.resolvers.engines_native import (
    World,
    flat_params,
    fsdp2_strategy,
    offload_all,
)
from fsdp_doctor.config.resolvers.words import (
    as_bool,
    as_int,
    as_number,
    class_name,
    dtype,
    optimizer_bits,
    optimizer_kind,
)
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("torchtune",)
ASSUMED: dict[str, str] = {"torchtune": "HEAD"}
_DISTRIBUTED = (
    "tensor_parallel_dim",
    "data_parallel_shard_dim",
    "data_parallel_replicate_dim",
    "context_parallel_dim",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "custom_sharded_layers",
)


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of a torchtune recipe."""
    draft = Draft(native, version)
    _model(draft)
    _sharding(draft)
    _precision(draft)
    _training(draft)
    _optimizer(draft)
    return draft.finish()


def _model(draft: Draft) -> None:
    component = "model._component_"
    draft.take("model.name", component, None, class_name)
    kind = draft.values["model.name"].value
    lora = kind is not None and ("lora" in kind)
    draft.derive("model.lora", lora, (component,), "by the component's name")
    if draft.has("model.lora_rank"):
        draft.take("model.lora_rank", "model.lora_rank", None, as_int)


def _sharding(draft: Draft) -> None:
    degree = as_int(draft.raw("tensor_parallel_dim"), 1)
    draft.put("parallel.tp", degree, "tensor_parallel_dim")
    if degree == 1:
        draft.drop_section("tensor_parallel_plan", "tensor_parallel_dim is 1")
    draft.take("parallel.cp", "context_parallel_dim", 1, as_int)
    draft.take("sharding.replicate_size", "data_parallel_replicate_dim", 1, as_int)
    why = "-1: all ranks left over"
    draft.take("sharding.shard_degree", "data_parallel_shard_dim", -1, as_int, reason=why)
    single = not any(draft.has(name) for name in _DISTRIBUTED) and _single_device(draft)
    if single:
        draft.derive("sharding.impl", "none", (), "single-device recipe")
        draft.derive("sharding.strategy", "none", (), "one device holds everything")
    else:
        draft.derive("sharding.impl", "fsdp2", (), "the distributed recipes call fully_shard")
        key = "fsdp_reshard_after_forward"
        reshard = as_bool(draft.raw(key), True)
        fsdp2_strategy(draft, reshard, key, World(), "as written, or true")
        draft.derive(
            "sharding.reshard_after_forward[root]", False, (), "the root is never resharded"
        )
        draft.derive("comm.prefetch_bwd", "pre", (), "FSDP2 gathers the next unit in backward")
        flat_params(draft, "per_parameter", (), "FSDP2 keeps single parameters as DTensors")
    layers = draft.raw("custom_sharded_layers")
    names = [str(item) for item in layers] if isinstance(layers, list) else []
    draft.put("sharding.extra_units", names or None, "custom_sharded_layers", "besides each block")
    draft.drop(("fsdp.cpu_offload",), "the recipes read fsdp_cpu_offload")
    offload_all(draft, "fsdp_cpu_offload", as_bool(draft.raw("fsdp_cpu_offload")))


def _single_device(draft: Draft) -> bool:
    """Guess the recipe: only the single-device one takes paged or 8-bit optimizers in backward."""
    named = str(draft.raw("optimizer._component_", default=""))
    return "bitsandbytes" in named or "Paged" in named


def _precision(draft: Draft) -> None:
    name = dtype(draft.raw("dtype", default="bf16")) or "float32"
    draft.put("precision.param_storage", name, "dtype", "no fp32 copy: pure")
    for key in ("compute", "grad", "optim_states", "reduce"):
        draft.derive(f"precision.{key}", name, ("dtype",), "as the stored parameters")


def _training(draft: Draft) -> None:
    draft.take("batch.micro", "batch_size", 1, as_int)
    draft.take("batch.accumulation", "gradient_accumulation_steps", 1, as_int)
    draft.take("batch.seq_len", "tokenizer.max_seq_len", None, as_int)
    draft.take("batch.packing", "dataset.packed", False, as_bool)
    draft.derive("comm.grad_sync", "every_microbatch", (), "torchtune never skips a reduction")
    on = as_bool(draft.raw("enable_activation_checkpointing"))
    draft.put("recompute.mode", "full" if on else "none", "enable_activation_checkpointing")
    moved = as_bool(draft.raw("enable_activation_offloading"))
    draft.put("offload.activations", "cpu" if moved else "none", "enable_activation_offloading")
    compiled = draft.section("compile.")
    on = any(as_bool(v) for v in compiled.values()) if compiled else as_bool(draft.raw("compile"))
    draft.put("compile.enabled", on, ("compile", *(f"compile.{name}" for name in compiled)))


def _optimizer(draft: Draft) -> None:
    name = draft.raw("optimizer._component_", default="AdamW")
    draft.put("optimizer.kind", optimizer_kind(name), "optimizer._component_")
    draft.derive("optimizer.bits", optimizer_bits(name), ("optimizer._component_",), "by its name")
    fused = draft.take("optimizer.fused", "optimizer.fused", False, as_bool)
    word = "fused" if fused else "default"
    draft.derive("optimizer.implementation", word, ("optimizer.fused",), "fused, or torch decides")
    draft.take("optimizer.learning_rate", "optimizer.lr", None, as_number)
    draft.take("optimizer.weight_decay", "optimizer.weight_decay", None, as_number)
    draft.take("optimizer.in_backward", "optimizer_in_bwd", False, as_bool)
    draft.take("optimizer.grad_clip", "clip_grad_norm", None, as_number)
