"""Native keys that move neither memory nor the time of a training step, whatever the framework.

Only for keys that no resolver has turned into a canonical field: names, paths, schedules, logging,
evaluation, saving, the launcher's addresses.
"""

from __future__ import annotations

import re

_LEAVES = re.compile(
    r"""(?x)
    (lr|learning_rate|min_lr|.*_lr|lr_.*|cosine_.*|.*warmup.*|.*decay_steps|.*decay_iters|t_max
    |alpha_f|beta_?\d|betas|adam_beta\d|(adam_)?eps(ilon)?|weight_decay|momentum|label_smoothing.*)
    |(steps|max_steps|train_iters|num_steps|.*epochs?|max_duration|total_.*steps?|max_samples
    |eval_interval|max_tokens|train_steps|limit_.*_batches)
    |(.*seed|name|.*_name|description|comment|comments|notes?|tags|group|project|entity|run|id
    |version_info|author|title|.*_url|.*_folder|.*_dir|.*_dirs|.*_path|.*_paths|path|.*_file
    |.*_files|assets|dir|folder|.*_folder_name|filename.*|max_filename)
    |(log.*|.*_logging|logging_.*|report_to|.*_log|print_.*|verbose|verbosity|progress_bar
    |wandb.*|trackio.*|mlflow.*|tensorboard.*|enable_tensorboard|console_.*|steps_per_print
    |wall_clock_breakdown|disable_tqdm|plot_loss|track_.*|log_freq|enable_wandb|save_tb_folder)
    |(eval_.*|evals_.*|val_.*|.*_eval|do_eval|do_train|do_predict|evaluation.*|evaluators?
    |per_device_eval.*|device_eval.*|run_val_.*|batch_size_val|early_stopping.*|load_best.*
    |metric_for_best.*|greater_is_better|test_.*|icl_.*)
    |(save|save_.*|saves_.*|.*_save|overwrite.*|resume.*|load|load_path|push_to_hub|hub_.*
    |keep_last.*|checkpoint_factor|export_dtype|interval|keep_latest.*|restore_.*)
    |(main_process_.*|machine_rank|rdzv_.*|same_network|main_training_function|debug|local_rank
    |compute_environment|downcast_bf16|tpu_.*|use_cpu|enable_cpu_affinity|master_.*|hostfile
    |ddp_timeout|.*timeout.*|trust_remote_code|chat_template|template|eot_tokens)
    |(loss_scale.*|initial_scale_power|hysteresis|min_loss_scale|zero_allow_untested_optimizer)
    """
)
_SECTIONS = re.compile(
    r"(.*\.)?(lr_scheduler|scheduler|logger|loggers|metric_logger|wandb|tracker|evaluators?|eval"
    r"|eval_loader|validation|checkpointer|special_tokens|job|monitor_config|tensorboard|logging"
    r"|callbacks|tokenizer|dataset_val|exp_manager|metrics|init|log|ckpt_paths)\..*"
)


def is_irrelevant(key: str) -> bool:
    """Return whether a native key is one of those."""
    leaf = key.rpartition(".")[2]
    if key.startswith(("env.", "packages.")):
        return False
    return leaf.startswith("_") or bool(_LEAVES.fullmatch(leaf) or _SECTIONS.fullmatch(key))
