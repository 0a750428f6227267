"""Native keys that change neither memory nor step time: paths, names, logging, schedules.

Keys are matched by their last part, as Megatron-LM's arguments are also fields of Bridge's
sections, or by the section they stand in.
"""

from __future__ import annotations

import re

_SECTIONS = (
    "ci.",
    "ema.",
    "exp_manager.",
    "hydra.",
    "launcher.",
    "logger.",
    "model.data.",
    "model.tokenizer.",
    "recipe.",
    "rng.",
    "run.",
    "scheduler.",
    "straggler.",
    "tokenizer.",
    "validation_dataloader.",
    "validation_dataset.",
    "wandb.",
)
_NAMES = frozenset(
    {
        "adlr_autoresume",
        "app_tag_run_name",
        "app_tag_run_version",
        "auto_detect_ckpt_format",
        "blend",
        "calculate_per_token_loss",
        "ckpt_assume_constant_structure",
        "ckpt_convert_format",
        "ckpt_convert_save",
        "ckpt_fully_parallel_load",
        "ckpt_fully_parallel_save_deprecated",
        "ckpt_step",
        "config_logger_dir",
        "data_args_path",
        "data_impl",
        "data_path",
        "dataloader_type",
        "dist_ckpt_format_deprecated",
        "dist_ckpt_optim_fully_reshardable",
        "dist_ckpt_strictness",
        "distributed_backend",
        "distributed_timeout_minutes",
        "embedding_init_method_std",
        "enable_experimental",
        "enable_one_logger",
        "end_weight_decay",
        "exit_duration_in_mins",
        "exit_interval",
        "exit_on_missing_checkpoint",
        "exit_signal_handler",
        "finetune",
        "full_validation",
        "fully_parallel_load",
        "hysteresis",
        "init_method_std",
        "initial_loss_scale",
        "load",
        "load_optim",
        "load_rng",
        "logging_level",
        "loss_scale",
        "loss_scale_window",
        "make_vocab_size_divisible_by",
        "manual_gc_eval",
        "manual_gc_interval",
        "merge_file",
        "min_loss_scale",
        "min_lr",
        "mmap_bin_files",
        "mock_data",
        "most_recent_k",
        "num_dataset_builder_threads",
        "num_workers",
        "override_opt_param_scheduler",
        "pretrained_checkpoint",
        "rank",
        "local_rank",
        "consumed_train_samples",
        "consumed_valid_samples",
        "iteration",
        "save",
        "save_interval",
        "save_optim",
        "save_retain_interval",
        "save_rng",
        "seed",
        "skip_train",
        "split",
        "start_weight_decay",
        "test_data_path",
        "train_data_path",
        "train_iters",
        "train_samples",
        "use_checkpoint_args",
        "use_checkpoint_opt_param_scheduler",
        "use_mp_args_from_checkpoint_args",
        "use_persistent_ckpt_worker",
        "valid_data_path",
        "vocab_file",
        "weight_decay_incr_style",
    }
)
_PATTERNS = re.compile(
    r"(adam_(beta|eps)\w*|lion_beta\d|muon_(momentum|nesterov|extra_scale_factor)|sgd_momentum"
    r"|lr_\w+|decoupled_(min_)?lr|log_\w+|tensorboard_\w+|wandb_\w+|mlflow_\w+|one_logger_\w+"
    r"|eval_\w+|exit_signal\w*|no_(load|save)_(optim|rng)|non_persistent_\w+|replication\w*"
    r"|timing_log_\w+|\w*_cache_path|tiktoken_\w+|tokenizer_\w+|flight_recorder_\w+|inprocess_\w+"
    r"|profile\w*|use_pytorch_profiler|nvtx_ranges|straggler_\w+|error_injection_\w+|rerun_mode)"
)


def without_effect(key: str) -> bool:
    """Return whether a native key is known to change neither memory nor step time."""
    if key.startswith(_SECTIONS):
        return True
    name = key.rpartition(".")[2]
    return name in _NAMES or _PATTERNS.fullmatch(name) is not None
