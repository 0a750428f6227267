"""Precision, recomputation, offload and optimizer of a Megatron job, as canonical fields."""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.resolvers.mcore_rules import engine
from fsdp_doctor.config.resolvers.mcore_settings import Settings
from fsdp_doctor.config.resolvers.mcore_sharding import compute_dtype, gradient_dtype

_GRADS = ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "bf16", "fp16")
_ENGINE = ("use_megatron_fsdp", "use_torch_fsdp2")


def precision_fields(settings: Settings) -> None:
    """Set ``precision.*``."""
    compute = compute_dtype(settings)
    native = "fp16" if settings.on("fp16") and not settings.on("bf16") else "bf16"
    settings.take("precision.compute", native, compute, also=("bf16", "fp16"))
    settings.claim("bf16", "fp16", "params_dtype", *_GRADS)
    fp8 = settings.get("fp8") or "none"
    settings.take("precision.fp8", "fp8", fp8)
    settings.take("precision.fp8_recipe", "fp8_recipe")
    if fp8 == "none":
        settings.inert("precision.fp8_recipe", "read with an fp8 format only")
    gathered = settings.on("fp8_param_gather") and fp8 != "none"
    settings.take(
        "precision.param_storage",
        "fp8_param_gather",
        "fp8" if gathered else compute,
        also=("fp8", "bf16", "fp16", "params_dtype"),
    )
    settings.take("precision.fp4", "fp4", settings.get("fp4") or "none")
    settings.take(
        "precision.residual_fp32",
        "fp32_residual_connection",
        settings.on("fp32_residual_connection"),
    )
    _gradient_precision(settings)
    _state_precision(settings, compute)


def _gradient_precision(settings: Settings) -> None:
    grad = gradient_dtype(settings)
    if engine(settings) == "megatron_fsdp":
        name = "megatron_fsdp_main_grads_dtype"
        if settings.version < (0, 19) and settings.on("accumulate_allreduce_grads_in_fp32"):
            name = "accumulate_allreduce_grads_in_fp32"
        settings.take("precision.grad", name, grad, also=(*_ENGINE, *_GRADS))
        named = settings.dtype("megatron_fsdp_grad_comm_dtype")
        reduce = grad if named in (None, "auto", "none") else named
        settings.take("precision.reduce", "megatron_fsdp_grad_comm_dtype", reduce, also=_ENGINE)
        return
    name = _GRADS[0]
    if settings.is_written("grad_reduce_in_bf16"):
        name = "grad_reduce_in_bf16"
    settings.take("precision.grad", name, grad, also=(*_ENGINE, *_GRADS))
    why = "gradients are reduced in the dtype that they are summed in"
    settings.derive("precision.reduce", grad, (name, *_GRADS, *_ENGINE), why)


def _state_precision(settings: Settings, compute: str) -> None:
    aware = settings.on("use_precision_aware_optimizer")
    settings.take("optimizer.precision_aware", "use_precision_aware_optimizer", aware)
    names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    values = [settings.dtype(name) or "float32" if aware else "float32" for name in names]
    master = values[0] if compute != "float32" else "none"
    if engine(settings) == "megatron_fsdp":  # keeps main weights beside float32 ones too
        named = settings.dtype("megatron_fsdp_main_params_dtype") or "float32"
        master = "none" if named in ("auto", "none") else named
        settings.take("precision.master", "megatron_fsdp_main_params_dtype", master, also=_ENGINE)
        settings.claim("main_params_dtype")
    else:
        also = ("use_precision_aware_optimizer", "bf16", "fp16", *_ENGINE)
        settings.take("precision.master", "main_params_dtype", master, also=also)
    for key, name, value in zip(
        ("precision.optim_states", "precision.optim_states_sq"), names[1:], values[1:], strict=True
    ):
        settings.take(key, name, value, also=("use_precision_aware_optimizer",))


def recompute_fields(settings: Settings) -> None:
    """Set ``recompute.*``."""
    mode = settings.get("recompute_granularity") or "none"
    settings.take("recompute.mode", "recompute_granularity", mode, also=("recompute_activations",))
    modules = as_list(settings.get("recompute_modules")) or ["core_attn"]
    settings.take(
        "recompute.modules", "recompute_modules", sorted(modules), also=("recompute_granularity",)
    )
    settings.take("recompute.method", "recompute_method")
    settings.take("recompute.num_layers", "recompute_num_layers")
    saved = settings.on("distribute_saved_activations")
    settings.take("recompute.distribute_saved", "distribute_saved_activations", saved)
    if mode != "selective":
        settings.inert("recompute.modules", "read with recompute_granularity selective only")
    if mode != "full":
        for name in ("method", "num_layers", "distribute_saved"):
            settings.inert(f"recompute.{name}", "read with recompute_granularity full only")


def offload_fields(settings: Settings) -> None:
    """Set ``offload.*``."""
    on = settings.on("optimizer_cpu_offload")
    settings.take("offload.optimizer", "optimizer_cpu_offload", "cpu" if on else "none")
    fraction = settings.get("optimizer_offload_fraction")
    settings.take("offload.optimizer_fraction", "optimizer_offload_fraction", fraction)
    overlap = "overlap_cpu_optimizer_d2h_h2d"
    settings.take("offload.optimizer_overlap", overlap, settings.on(overlap))
    if not on:
        for name in ("optimizer_fraction", "optimizer_overlap"):
            settings.inert(f"offload.{name}", "read with optimizer_cpu_offload only")
    layers = settings.number("cpu_offloading_num_layers") or 0
    if settings.field("cpu_offloading") is not None and not settings.on("cpu_offloading"):
        layers = layers if settings.native.framework == "megatron-lm" else 0
    modules = as_list(settings.get("offload_modules"))
    fine = settings.on("fine_grained_activation_offloading")
    settings.claim("cpu_offloading")
    value = "modules" if fine else "layers" if layers else "none"
    name = "fine_grained_activation_offloading" if fine else "cpu_offloading_num_layers"
    settings.take(
        "offload.activations",
        name,
        value,
        also=(
            "fine_grained_activation_offloading",
            "cpu_offloading_num_layers",
            "cpu_offloading",
        ),
    )
    settings.claim("fine_grained_activation_offloading", "cpu_offloading_num_layers")
    settings.take("offload.activation_layers", "cpu_offloading_num_layers", layers)
    settings.take("offload.modules", "offload_modules", sorted(modules))
    if not layers:
        settings.inert("offload.activation_layers", "no layers are offloaded")
    if not fine:
        settings.inert("offload.modules", "read with fine_grained_activation_offloading only")


def optimizer_fields(settings: Settings) -> None:
    """Set ``optimizer.*``."""
    kind = str(settings.get("optimizer") or "adam").lower()
    why = "Megatron's adam decouples weight decay: AdamW" if kind == "adam" else None
    settings.take("optimizer.kind", "optimizer", "adamw" if kind == "adam" else kind, reason=why)
    settings.take("optimizer.grad_clip", "clip_grad")
    settings.take("optimizer.learning_rate", "lr")
    settings.take("optimizer.weight_decay", "weight_decay")
    layout = settings.get("use_layer_wise_param_layout")
    settings.take("optimizer.layer_wise_layout", "use_layer_wise_param_layout", layout)
    if "muon" not in kind and kind not in ("lion", "soap"):
        settings.inert("optimizer.layer_wise_layout", "layer-wise optimizers only")


def as_list(value: Any) -> list[str]:
    """Return a list of words given as list, text or nothing."""
    if value is None or value == "":
        return []
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    return str(value).strip("[]").replace(",", " ").split()
