"""Bridge's ``mixed_precision`` and ``comm_overlap``: objects that overwrite other sections.

Source: mixed_precision.py (MixedPrecisionConfig.setup copies every field that model, optimizer or
ddp has under the same name) and comm_overlap.py (_get_optimizer_overlap_cfgs) of Bridge 0.1 to 0.6.
"""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.resolvers.mcore_settings import Settings

BUCKET_ELEMENTS = 128 * 1024 * 1024
"""Bucket size that ``comm_overlap`` sets under data parallelism."""
_COPIED = {
    "bf16": "bf16",
    "fp16": "fp16",
    "first_last_layers_bf16": "first_last_layers_bf16",
    "fp8": "fp8",
    "fp8_recipe": "fp8_recipe",
    "fp8_amax_compute_algo": "fp8_amax_compute_algo",
    "fp8_amax_history_len": "fp8_amax_history_len",
    "fp8_margin": "fp8_margin",
    "fp8_wgrad": "fp8_wgrad",
    "fp8_param_gather": "fp8_param_gather",
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "params_dtype": "params_dtype",
    "reuse_grad_buf_for_mxfp8_param_ag": "reuse_grad_buf_for_mxfp8_param_ag",
}
"""Setting -> field of ``mixed_precision`` that overwrites it."""
_RECIPES = (
    ("mxfp8", "mxfp8"),
    ("delayed_scaling", "delayed"),
    ("current_scaling", "tensorwise"),
    ("subchannel", "blockwise"),
    ("fp8", "tensorwise"),
)


def mixed_precision_layer(settings: Settings, *, full: bool) -> None:
    """Let ``mixed_precision`` overwrite dtypes; ``full``: the config names every field."""
    whole = settings.native.fields.get("mixed_precision")
    why = "overwritten by mixed_precision"
    if whole is not None and isinstance(whole.value, str):
        for name, value in named_precision(whole.value).items():
            settings.redirect(name, "mixed_precision", value, why)
        return
    for name, field in _COPIED.items():
        path = f"mixed_precision.{field}"
        found = settings.native.fields.get(path)
        if found is not None:
            settings.redirect(name, path, found.value, why)
    if whole is None and not full:
        _recipe_precision(settings)


def _recipe_precision(settings: Settings) -> None:
    """Bridge's base recipe has bf16_mixed, so fields of ddp and model are overwritten by it."""
    why = "overwritten by mixed_precision, bf16_mixed in the base recipe"
    for name, value in named_precision("bf16_mixed").items():
        if settings.path(name).startswith("mixed_precision"):
            continue
        if settings.field(name) is not None:
            settings.force(name, value, why)


def named_precision(name: str) -> dict[str, Any]:
    """Return the settings of a named precision such as ``bf16_with_mxfp8_mixed``."""
    folded = name.replace("-", "_").lower()
    values: dict[str, Any] = {
        "bf16": folded.startswith("bf16") or "nvfp4" in folded,
        "fp16": folded.startswith(("fp16", "16")),
        "accumulate_allreduce_grads_in_fp32": "mixed" in folded,
    }
    if "fp8" in folded:
        recipe = next(recipe for text, recipe in _RECIPES if text in folded)
        values |= {
            "fp8": "e4m3" if recipe in ("mxfp8", "blockwise") else "hybrid",
            "fp8_recipe": recipe,
            "fp8_param_gather": recipe != "blockwise",
        }
    if "fp4" in folded:
        values |= {"fp4": "e2m1"}
    return values


def comm_overlap_layer(settings: Settings) -> None:
    """Let ``comm_overlap`` overwrite the overlap of ddp, where there is one."""
    given = {
        path.partition(".")[2]: field.value
        for path, field in settings.native.fields.items()
        if path.startswith("comm_overlap.")
    }
    if not given or settings.number("data_parallel_size") == 1:
        return
    if given.get("tp_comm_overlap") is not None:
        path = "comm_overlap.tp_comm_overlap"
        settings.redirect("tp_comm_overlap", path, given["tp_comm_overlap"], _WHY)
    if not settings.on("use_distributed_optimizer"):
        return
    pipelined = (settings.number("pipeline_model_parallel_size") or 1) > 1
    virtual = (settings.number("virtual_pipeline_model_parallel_size") or 1) > 1
    for name, field, value in (
        ("ddp_bucket_size", "bucket_size", BUCKET_ELEMENTS),
        ("overlap_grad_reduce", "overlap_grad_reduce", True),
        ("overlap_param_gather", "overlap_param_gather", True),
        ("align_param_gather", "align_param_gather", pipelined and virtual),
    ):
        own = given.get(field)
        path = f"comm_overlap.{field}"
        settings.redirect(name, path, value if own is None else own, _WHY)


_WHY = "overwritten by comm_overlap, which sets this under data parallelism"
