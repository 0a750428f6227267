"""Tracebacks: the frames around a failure, and the phase they show."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdp_doctor.model.memory import Phase

_FRAME = re.compile(r'File "([^"\n]{1,400})", line (\d+), in (\S+)')
MAX_FRAMES = 64

_PHASES: tuple[tuple[Phase, re.Pattern[str]], ...] = tuple(
    (phase, re.compile(pattern, re.IGNORECASE))
    for phase, pattern in (
        (
            Phase.GRAPH_CAPTURE,
            r"make_graphed_callables|create_cudagraphs|capture_begin|cuda_graph\w*\.capture"
            r"|cudagraph_trees|capture_end|cuda/graphs\.py|CUDAGraph\b|_capture_\w*graph"
            r"|record_graph|capture_model",
        ),
        (
            Phase.CHECKPOINT_SAVE,
            r"save_(?:model_)?checkpoint|_save_checkpoint|save_(?:full_)?(?:model|pretrained|state)"
            r"|save_to_disk|dist_checkpointing.{0,40}save|dcp\.save|_save_optim|torch\.save"
            r"|failed to clone\(\) tensor|state_dict_utils.{0,60}(?:post|clone)|full_state_dict"
            r"|_full_post_state_dict|gather_full|get_model_state_dict|get_optimizer_state_dict"
            r"|\boptim_state_dict\b|_optim_state_dict|consolidated_16bit"
            r"|(?<!load)_state_dict_hook|\w\.state_dict\(\)|async_save|_save_to_state"
            r"|\bin (?!save_for_backward|save_on_cpu)(?:\w+_)?save(?:_\w+)?\b|checkpoint_save",
        ),
        (
            Phase.CHECKPOINT_LOAD,
            r"load_checkpoint|_load_from_checkpoint|load_optimizer|resume_from|dcp\.load"
            r"|load_sharded_optim|optim_state_dict_to_load|(?<!_)load_state_dict\b"
            r"|restore_checkpoint",
        ),
        (
            Phase.GENERATION,
            r"\bin generate\b|generate_sequences|in _?(?:greedy_search|sample|beam_search)\b|vllm/",
        ),
        (
            Phase.EVALUATION,
            r"evaluation_loop|\bevaluate\b|prediction_step|nested_concat|validation_step"
            r"|\bin (?:\w+_)?(?:eval|evaluate|evaluation|validate|validation)(?:_\w+)?\b|eval_loop"
            r"|pad_across_processes"
            r"|validation_epoch_end|_run_eval|evaluate_and_print",
        ),
        (
            Phase.BACKWARD,
            r"in backward\b|autograd/__init__|run_backward|\.backward\(|_engine_run_backward"
            r"|backward_step|post_backward|reduce_scatter_grad|unscale_|reduce_ipg|_reduce_grad"
            r"|reduce_independent|allreduce_gradients|finalize_model_grads",
        ),
        (
            Phase.OPTIMIZER,
            r"_multi_tensor_|_foreach_|_single_tensor_adam|optim/\w+\.py.{0,40}in step\b"
            r"|_init_group|adamw?\.py.{0,40}in step|optimizer\.step\(\)|in optimizer_step\b"
            r"|fused_adam|multi_tensor_apply|bitsandbytes/optim|step_with_ready_grads"
            r"|_take_model_step|_optimizer_step|prepare_grads|clip_grad",
        ),
        (
            Phase.LOAD,
            r"from_pretrained|set_module_tensor_to_device|_load_state_dict_into|load_pretrained"
            r"|load_model\b|Loading checkpoint shards|checkpoint_files|safe_open|load_weights"
            r"|_move_missing_keys|_load_pretrained_model|get_peft_model|model\.(?:to"
            r"|cuda)\(|in convert\b|build_model",
        ),
        (
            Phase.WRAP,
            r"DistributedDataParallel\(|_ddp_init_helper|dist\.Reducer|\bfully_shard\("
            r"|in fully_shard\b|_auto_wrap"
            r"|FullyShardedDataParallel\(|_init_param_handle|flat_param\w*\.py.{0,60}init"
            r"|in prepare(?:_model)?\b|_materialize|sync_module_states|zero\.Init|to_empty"
            r"|deepspeed\.initialize|_configure_(?:zero|distributed)_?\w*|get_model_and_optimizer"
            r"|setup_model_and_optimizer|in configure_model",
        ),
        (
            Phase.FORWARD,
            r"\bin forward\b|_call_impl|forward_step|compute_loss|training_step|_forward_micro"
            r"|forward_backward|compute_log_prob|\bloss = |cross_entropy|logits|gelu|softmax"
            r"|\.forward\(|in train_step|_pre_forward|attention|mlp\b",
        ),
        (Phase.DATA, r"dataloader|_next_data|fetch\.py|collate|pin_memory_loop|data_queue"),
        (
            Phase.INIT,
            r"init_process_group|init_distributed|initialize_megatron|set_device|_lazy_init"
            r"|new_group|init_flat_param_attributes|_init_device|lazy_init",
        ),
    )
)

_CLOSURE = re.compile(r"training_step|in forward\b.*closure|closure.*in forward\b", re.DOTALL)
"""Lightning runs forward inside ``optimizer.step(closure)``."""


def frames_in(lines: Sequence[str]) -> list[str]:
    """Return the frames of the traceback in ``lines``, innermost first.

    With several tracebacks (chained exceptions) it is the last one's.
    """
    frames: list[str] = []
    for index, line in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            frames = []
            continue
        found = _FRAME.search(line)
        if found is None:
            continue
        source = lines[index + 1].strip() if index + 1 < len(lines) else ""
        if _FRAME.search(source) or source.startswith("Traceback"):
            source = ""
        frames.append(
            f"{found[1]}:{found[2]} in {found[3]}" + (f": {source[:200]}" if source else "")
        )
    return frames[::-1][:MAX_FRAMES]


def phase_of(text: str) -> Phase:
    """Return the phase that frames or other lines show, most telling first."""
    for phase, pattern in _PHASES:
        if phase is Phase.OPTIMIZER and _CLOSURE.search(text) is not None:
            continue
        if pattern.search(text) is not None:
            return phase
    return Phase.UNKNOWN
