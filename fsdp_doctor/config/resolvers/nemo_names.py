"""Where NeMo keeps Megatron's settings: the ends of its dotted keys, most telling first."""

from __future__ import annotations

from collections.abc import Iterable

_SAME = (
    "attention_backend",
    "bf16",
    "context_parallel_size",
    "cpu_offloading",
    "cpu_offloading_num_layers",
    "cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl",
    "cuda_graph_impl",
    "data_parallel_sharding_strategy",
    "empty_unused_memory_level",
    "enable_cuda_graph",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "ffn_hidden_size",
    "fine_grained_activation_offloading",
    "fp32_residual_connection",
    "fp8_param_gather",
    "fp8_recipe",
    "fsdp_double_buffer",
    "global_batch_size",
    "gradient_accumulation_fusion",
    "hidden_size",
    "kv_channels",
    "main_grads_dtype",
    "main_params_dtype",
    "max_position_embeddings",
    "micro_batch_size",
    "moe_aux_loss_coeff",
    "moe_ffn_hidden_size",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_load_balancing_type",
    "moe_router_topk",
    "moe_token_dispatcher_type",
    "nccl_ub",
    "num_attention_heads",
    "num_distributed_optimizer_instances",
    "num_layers",
    "num_query_groups",
    "offload_modules",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "overlap_grad_reduce",
    "overlap_p2p_comm",
    "overlap_param_gather",
    "pipeline_model_parallel_size",
    "position_embedding_type",
    "rampup_batch_size",
    "recompute_granularity",
    "recompute_method",
    "recompute_modules",
    "recompute_num_layers",
    "sequence_parallel",
    "suggested_communication_unit_size",
    "tensor_model_parallel_size",
    "tp_comm_overlap",
    "use_cpu_initialization",
    "use_custom_fsdp",
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "use_precision_aware_optimizer",
    "virtual_pipeline_model_parallel_size",
    "vocab_size",
)
ENDS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in _SAME},
    "accumulate_allreduce_grads_in_fp32": ("grad_reduce_in_fp32",),
    "async_save": ("strategy.ckpt_async_save", "checkpoint.async_save"),
    "clip_grad": ("clip_grad", "trainer.gradient_clip_val", "policy.max_grad_norm"),
    "ddp_average_in_collective": ("average_in_collective",),
    "ddp_bucket_size": ("ddp.bucket_size", "distributed_data_parallel_config.bucket_size"),
    "distribute_saved_activations": ("distribute_saved_activations",),
    "fp8": ("fp8",),
    "lr": ("optim.lr", "optim.config.lr", "optimizer.lr"),
    "num_experts": ("num_moe_experts",),
    "optimizer": ("optim.config.optimizer", "optimizer.optimizer"),
    "recompute_granularity": ("recompute_granularity", "activations_checkpoint_granularity"),
    "recompute_method": ("recompute_method", "activations_checkpoint_method"),
    "recompute_num_layers": ("recompute_num_layers", "activations_checkpoint_num_layers"),
    "seq_length": (
        "data.seq_length",
        "model.encoder_seq_length",
        "data.train_ds.max_seq_length",
        "policy.max_total_sequence_length",
        "seq_length",
    ),
    "swiglu": ("model.activation", "gated_linear_unit"),
    "tp_comm_overlap": ("tp_comm_overlap", "ub_tp_comm_overlap"),
    "untie_embeddings_and_output_weights": ("share_embeddings_and_output_weights",),
    "weight_decay": ("optim.weight_decay", "optim.config.weight_decay", "optimizer.weight_decay"),
}
"""Name in Megatron-LM -> ends of dotted keys."""
_GLOBAL_BATCH = ("data.train_ds.global_batch_size", "policy.train_global_batch_size")
_MICRO_BATCH = ("data.train_ds.micro_batch_size", "policy.train_micro_batch_size")
ENDS["global_batch_size"] = (*_GLOBAL_BATCH, "model.global_batch_size", "global_batch_size")
ENDS["micro_batch_size"] = (*_MICRO_BATCH, "model.micro_batch_size", "micro_batch_size")


def paths_in(keys: Iterable[str], within: str = "") -> dict[str, str]:
    """Return the native key of each setting that stands in ``keys``; the shortest of several.

    ``within``: only keys that start so, or that an end names in full.
    """
    ordered = sorted(keys, key=lambda key: (key.count("."), len(key)))
    found: dict[str, str] = {}
    for name, ends in ENDS.items():
        for end in ends:
            match = next((key for key in ordered if _fits(key, end, within)), None)
            if match is not None:
                found[name] = match
                break
    return found


def _fits(key: str, end: str, within: str) -> bool:
    if key == end:
        return True
    return key.endswith(f".{end}") and key.startswith(within)
