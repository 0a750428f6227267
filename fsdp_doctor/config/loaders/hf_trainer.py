"""HF ``TrainingArguments`` as JSON or YAML, with ms-swift's ``_description`` keys; TRL configs."""

from __future__ import annotations

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of, word_set
from fsdp_doctor.model.config import NativeConfig

FORMAT = "hf_trainer"
ARGUMENTS = word_set(
    """accelerator_config activation_checkpointing activation_checkpointing_kwargs adafactor
    adam_beta1 adam_beta2 adam_epsilon auto_find_batch_size average_tokens_across_devices
    batch_eval_metrics bf16 bf16_full_eval data_seed dataloader_drop_last dataloader_in_order
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers
    dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed
    disable_tqdm do_eval do_predict do_train enable_jit_checkpoint eval_accumulation_steps
    eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy
    eval_use_gather_object evaluation_strategy fp16 fp16_backend fp16_full_eval fp16_opt_level
    fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap full_determinism
    gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
    greater_is_better group_by_length half_precision_backend hub_always_push hub_model_id
    hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
    include_for_metrics include_inputs_for_metrics include_num_input_tokens_seen
    include_tokens_per_second jit_mode_eval label_names label_smoothing_factor learning_rate
    length_column_name liger_kernel_config load_best_model_at_end local_rank log_level
    log_level_replica log_on_each_node logging_dir logging_first_step logging_nan_inf_filter
    logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps
    metric_for_best_model mp_parameters neftune_noise_alpha no_cuda num_train_epochs optim
    optim_args optim_target_modules output_dir overwrite_output_dir parallelism_config past_index
    per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project push_to_hub
    push_to_hub_model_id push_to_hub_organization push_to_hub_token ray_scope remove_unused_columns
    report_to restore_callback_states_from_checkpoint resume_from_checkpoint run_name
    save_on_each_node save_only_model save_safetensors save_steps save_strategy save_total_limit
    seed sharded_ddp skip_memory_metrics split_batches tf32 torch_compile torch_compile_backend
    torch_compile_mode torch_empty_cache_steps torchdynamo tpu_metrics_debug tpu_num_cores
    trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy use_cache
    use_cpu use_ipex use_legacy_prediction_loop use_liger_kernel use_mps_device warmup_ratio
    warmup_steps weight_decay torch_dtype model_name_or_path"""
)
"""Arguments of transformers 4.46 to 5.24; a script's own arguments stand beside them."""
_CERTAIN = word_set(
    """per_device_train_batch_size per_device_eval_batch_size ddp_bucket_cap_mb
    gradient_checkpointing_kwargs lr_scheduler_type num_train_epochs"""
)
_OTHERS = word_set(
    """base_model micro_batch_size finetuning_type distributed_type stage model_class
    zero_optimization actor_rollout_ref trainer model config workload"""
)


def detect(source: Source) -> int:
    """Names of TrainingArguments at the top."""
    data = mapping_of(source)
    named = {key for key in data if not key.startswith("_")}
    known = named & ARGUMENTS
    if not known or named & _OTHERS:
        return 0
    if known & _CERTAIN:
        return 92
    if "fsdp" in known and named <= ARGUMENTS:
        return 91
    if len(known) * 2 >= len(named) and {"fsdp", "deepspeed", "bf16", "fsdp_config"} & known:
        return 75
    return 50 if len(known) >= 3 and len(known) * 2 >= len(named) else 0


def load(source: Source) -> NativeConfig:
    """Return the arguments; keys that ``TrainingArguments`` does not have may be a script's own."""
    structure = structure_of(source)
    packages: dict[str, str] = {}
    for key in ("transformers_version", "_transformers_version"):
        version = structure.data.get(key)
        if isinstance(version, str):
            packages["transformers"] = version
    return NativeConfig(
        format=FORMAT,
        framework="hf-trainer",
        fields=fields_of(structure, source),
        unknown=unknown_arguments(structure.data),
        unresolved=structure.notes,
        packages=packages,
        nested=structure.data,
    )


_FSDP = word_set(
    """version min_num_params transformer_layer_cls_to_wrap backward_prefetch forward_prefetch
    limit_all_gathers use_orig_params sync_module_states cpu_ram_efficient_loading
    activation_checkpointing xla xla_fsdp_settings xla_fsdp_v2 xla_fsdp_grad_ckpt cpu_offload
    auto_wrap_policy state_dict_type reshard_after_forward"""
)


def unknown_arguments(data: dict[str, object]) -> tuple[str, ...]:
    """Return keys of ``fsdp_config`` that the Trainer never reads."""
    block = data.get("fsdp_config")
    if not isinstance(block, dict):
        return ()
    return tuple(f"fsdp_config.{k}" for k in block if k.removeprefix("fsdp_") not in _FSDP)
