"""Settings that Megatron overwrites, or never reads, before a job starts.

Source: megatron/training/arguments.py (validate_args), megatron/core/distributed/fsdp
(mcore_fsdp_adapter.py, megatron_fsdp.py), megatron/core/distributed_data_parallel_config.py,
transformer_config.py and optimizer_config.py of megatron-core 0.12 to 0.20.
"""

from __future__ import annotations

from fsdp_doctor.config.resolvers.mcore_settings import Settings

FSDP_ONLY = (
    "data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy",
    "suggested_communication_unit_size",
    "fsdp_double_buffer",
    "fsdp_manual_registration",
    "fsdp_db_use_persist_buf_on_alloc_fail",
    "fsdp_all_gather_in_start_param_sync",
    "keep_fp8_transpose_cache",
    "keep_fp8_transpose_cache_when_using_custom_fsdp",
    "megatron_fsdp_version",
    "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_grad_comm_dtype",
    "megatron_fsdp_max_pool_double_buffer",
    "megatron_fsdp_enable_fine_grained_param_gather",
    "preserve_fp32_weights",
    "enable_full_sharding_in_hsdp",
)
_PRECISION_AWARE = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_FP8 = (
    "fp8_recipe",
    "fp8_margin",
    "fp8_amax_history_len",
    "fp8_amax_compute_algo",
    "fp8_wgrad",
    "fp8_interval",
    "first_last_layers_bf16",
)
_EXPERTS = (
    "moe_grouped_gemm",
    "moe_token_dispatcher_type",
    "moe_router_topk",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_permute_fusion",
)
_OFFLOADED = (
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads",
    "pin_cpu_params",
    "use_torch_optimizer_for_cpu_offload",
)
_SHARDED = ("optim_grads", "optim_grads_params")


def uses_megatron_fsdp(settings: Settings) -> bool:
    """Return whether Megatron-FSDP wraps the model (``use_custom_fsdp`` before 0.14)."""
    return settings.on("use_megatron_fsdp") or settings.on("use_custom_fsdp")


def engine(settings: Settings) -> str:
    """Return which engine wraps the model; torch FSDP2 is asked for first."""
    if settings.on("use_torch_fsdp2"):
        return "mcore_torch_fsdp2"
    if uses_megatron_fsdp(settings):
        return "megatron_fsdp"
    return "megatron_distopt" if settings.on("use_distributed_optimizer") else "megatron_ddp"


def strategy(settings: Settings) -> str:
    """Return what is divided among the data-parallel ranks."""
    kind = engine(settings)
    if kind == "mcore_torch_fsdp2":
        return "optim_grads_params"
    if kind == "megatron_fsdp":
        name = str(settings.get("data_parallel_sharding_strategy"))
        return "none" if name == "no_shard" else name
    return "optim" if kind == "megatron_distopt" else "none"


def apply_rules(settings: Settings) -> None:
    """Apply every rule, in the order in which Megatron does."""
    _engine_rules(settings)
    _parallel_rules(settings)
    _precision_rules(settings)
    _optimizer_rules(settings)
    _recompute_rules(settings)


def _engine_rules(settings: Settings) -> None:
    kind = engine(settings)
    if kind != "megatron_fsdp":
        switch = settings.path("use_megatron_fsdp")
        settings.ignore(FSDP_ONLY, f"read with {switch} only")
    else:
        _fsdp_rules(settings)
    if kind == "mcore_torch_fsdp2":
        settings.ignore(("use_megatron_fsdp",), "torch FSDP2 is asked for first")
    else:
        settings.ignore(("torch_fsdp2_reshard_after_forward",), "read with use_torch_fsdp2 only")
    if not settings.on("overlap_grad_reduce") and kind in ("megatron_ddp", "megatron_distopt"):
        settings.ignore(
            ("ddp_bucket_size", "ddp_num_buckets"),
            "one bucket: gradients are reduced at the end, overlap_grad_reduce is off",
        )


def _fsdp_rules(settings: Settings) -> None:
    fsdp = ("use_megatron_fsdp",)
    if settings.number("megatron_fsdp_version") == 2:
        why = "Megatron-FSDP version 2 knows optim_grads_params only, and no overlap"
        settings.force("data_parallel_sharding_strategy", "optim_grads_params", why, fsdp)
        for name in ("overlap_grad_reduce", "overlap_param_gather"):
            settings.force(name, False, why, fsdp)
        return
    if settings.version >= (0, 18) or settings.is_written("use_distributed_optimizer"):
        why = "Megatron-FSDP brings its own sharded optimizer and sets this"
        settings.force("use_distributed_optimizer", True, why, fsdp)
    name = settings.get("data_parallel_sharding_strategy")
    because = ("use_megatron_fsdp", "data_parallel_sharding_strategy")
    if name in _SHARDED:
        settings.force("overlap_grad_reduce", True, f"Megatron-FSDP with {name} sets this", because)
    if name == "optim_grads_params":
        settings.force(
            "overlap_param_gather", True, f"Megatron-FSDP with {name} sets this", because
        )
    if settings.on("reuse_grad_buf_for_mxfp8_param_ag"):
        why = "Megatron-FSDP has no gradient buffer to reuse"
        settings.force("reuse_grad_buf_for_mxfp8_param_ag", False, why, fsdp)
    if settings.on("nccl_ub"):
        _user_buffer_rules(settings)
    if settings.version >= (0, 19):
        settings.ignore(
            ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16"),
            "Megatron-FSDP reads megatron_fsdp_main_grads_dtype instead (since 0.19)",
        )
    if (
        name != "optim_grads_params"
        or (settings.number("num_distributed_optimizer_instances")) == 1
    ):
        settings.ignore(
            ("outer_dp_sharding_strategy",),
            "acts with optim_grads_params and several optimizer instances only",
        )


def _user_buffer_rules(settings: Settings) -> None:
    because = ("nccl_ub", "use_megatron_fsdp")
    why = "NCCL user buffers under Megatron-FSDP set this"
    settings.force("fsdp_double_buffer", True, why, because)
    if settings.native.framework == "megatron-lm" and settings.version >= (0, 18):
        settings.force("fsdp_manual_registration", True, why, because)


_INTERLEAVING = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size",
)


def _interleaved(settings: Settings) -> bool:
    return any(settings.get(name) is not None for name in _INTERLEAVING)


def _parallel_rules(settings: Settings) -> None:
    alone = settings.number("tensor_model_parallel_size") == 1
    lenient = settings.native.framework == "megatron-lm"
    if settings.on("sequence_parallel") and alone and lenient:
        why = "switched off: the tensor-parallel size is 1"
        settings.force("sequence_parallel", False, why, ("tensor_model_parallel_size",))
    if settings.native.framework == "megatron-lm" and not _interleaved(settings):
        why = "switched off: pipeline stages are not interleaved"
        for name in ("align_param_gather", "overlap_p2p_comm"):
            if settings.on(name):
                settings.force(name, value=False, reason=why, because=_INTERLEAVING)
    if settings.get("num_experts") is None:
        settings.ignore(
            (
                "moe_grouped_gemm",
                "moe_token_dispatcher_type",
                "moe_router_topk",
                "moe_router_load_balancing_type",
                "moe_aux_loss_coeff",
                "moe_permute_fusion",
            ),
            "no experts: num_experts is not set",
        )


def _precision_rules(settings: Settings) -> None:
    fp32 = "accumulate_allreduce_grads_in_fp32"
    in_low = settings.on("grad_reduce_in_bf16") or settings.on(fp32)
    narrow = settings.dtype("main_grads_dtype") not in (None, "float32")
    in_low = in_low or narrow
    if settings.native.framework == "megatron-lm" and settings.on("bf16") and not in_low:
        why = "bf16 without grad_reduce_in_bf16 sums gradients in float32"
        settings.force(fp32, True, why, ("bf16", "grad_reduce_in_bf16"))
    if not settings.get("fp8"):
        settings.ignore(_FP8, "read with an fp8 format only")


def _optimizer_rules(settings: Settings) -> None:
    if not settings.on("use_precision_aware_optimizer"):
        settings.ignore(_PRECISION_AWARE, "read with use_precision_aware_optimizer only")
    if not settings.on("optimizer_cpu_offload"):
        settings.ignore(
            (
                "optimizer_offload_fraction",
                "overlap_cpu_optimizer_d2h_h2d",
                "pin_cpu_grads",
                "pin_cpu_params",
                "use_torch_optimizer_for_cpu_offload",
            ),
            "read with optimizer_cpu_offload only",
        )


def _recompute_rules(settings: Settings) -> None:
    if settings.on("recompute_activations") and settings.get("recompute_granularity") is None:
        why = "recompute_activations stands for granularity selective"
        settings.force("recompute_granularity", "selective", why, ("recompute_activations",))
    settings.claim("recompute_activations")
    mode = settings.get("recompute_granularity")
    if mode != "selective":
        settings.ignore(("recompute_modules",), "read with recompute_granularity selective only")
    if mode != "full":
        settings.ignore(
            ("recompute_method", "recompute_num_layers", "distribute_saved_activations"),
            "read with recompute_granularity full only",
        )
