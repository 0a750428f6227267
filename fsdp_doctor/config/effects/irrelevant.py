"""Native keys that move neither memory nor the time of a training step, whatever the framework.

Only for keys that no resolver has turned into a canonical field: names, paths, schedules, logging,
evaluation, saving, the launcher's addresses.
"""

from __future__ import annotations

_NAME_TEXT = """
    adam_beta1 adam_beta2 adam_epsilon alpha_f assets author beta1 beta2 betas chat_template comment
    comments compute_environment ddp_timeout debug description dir disable_tqdm do_eval do_predict
    do_train downcast_bf16 enable_cpu_affinity enable_tensorboard enable_wandb entity eot_tokens eps
    epsilon eval_interval evaluators export_dtype folder greater_is_better group hostfile hysteresis
    id initial_scale_power interval label_smoothing label_smoothing_factor learning_rate
    load load_path local_rank lr machine_rank main_training_function max_duration max_filename
    max_samples max_steps max_tokens metric_for_best_model min_loss_scale min_lr note
    notes num_steps path plot_loss progress_bar project push_to_hub report_to run run_name
    job_name experiment_name exp_name project_name same_network save
    seed steps steps_per_print t_max tags template title total_num_steps train_iters train_steps
    trust_remote_code use_cpu verbose verbosity wall_clock_breakdown weight_decay
    zero_allow_untested_optimizer checkpoint_factor batch_size_val log_freq save_tb_folder
    """
_BEGIN = (
    "_", "console_", "cosine_", "device_eval", "early_stopping", "eval_", "evals_", "evaluation",
    "hub_", "icl_", "keep_last", "keep_latest", "load_best", "log_", "logging", "loss_scale", "lr_",
    "main_process_", "master_", "mlflow", "overwrite", "per_device_eval", "print_", "rdzv_",
    "restore_", "resume", "run_val_", "save_", "saves_", "tensorboard", "test_", "tpu_", "track_",
    "trackio", "val_", "wandb",
)  # fmt: skip
_END = (
    "_assets", "_decay_iters", "_decay_steps", "_dir", "_dirs", "_epochs", "_eval", "_file",
    "_files", "_folder", "_log", "_logging", "_lr", "_path", "_paths", "_save", "_seed",
    "_timeout", "_url", "_warmup", "epochs", "warmup", "warmup_steps", "warmup_ratio", "_batches",
)  # fmt: skip
_SECTION_TEXT = """
    callbacks checkpointer ckpt_paths dataset_val eval eval_loader evaluator evaluators exp_manager
    init job log logger loggers logging lr_scheduler metric_logger metrics monitor_config scheduler
    special_tokens tensorboard tokenizer tracker validation wandb
    """
_MODEL = frozenset({"model_name_or_path", "pretrained_model_name_or_path", "model_path"})
"""Paths that name a model: another one is a change."""
_NAMES = frozenset(_NAME_TEXT.split())
_SECTIONS = frozenset(_SECTION_TEXT.split())


def is_irrelevant(key: str) -> bool:
    """Return whether a native key is one of those."""
    *sections, leaf = key.split(".")
    if sections[:1] in (["env"], ["packages"]) or leaf in _MODEL:
        return False
    if leaf in _NAMES or leaf.startswith(_BEGIN) or leaf.endswith(_END):
        return True
    return key.startswith("_") or not _SECTIONS.isdisjoint(sections)
