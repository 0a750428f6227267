"""What is said about each cause: claim, flags, advice, and what would decide for it.

Claims and advice are formatted with the evidence: ``{request}``, ``{idle}``, ``{others}``,
``{phase}`` and so on are sizes and words; ``saves`` names the evidence whose bytes a change saves.
Where bytes are unknown the saving is said as a formula (psi = parameters, N = ranks that shard).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """Advice before it has numbers."""

    change: str
    saves: str | None = None
    """Name of the evidence whose bytes it saves."""
    saves_text: str | None = None
    cost: str | None = None
    replay: str | None = None
    """Allocator setting whose replay on a memory snapshot tells what the change does."""


@dataclass(frozen=True, slots=True)
class Cause:
    """One word of the vocabulary."""

    claim: str
    flags: tuple[str, ...]
    changes: tuple[Change, ...]
    decide: str
    """Evidence that would confirm or exclude it."""
    seen: str | None = None
    """The claim where a memory snapshot shows it."""
    remark: bool = False
    """Whether it only goes with another cause: it comes last, as a note."""


CAUSES: dict[str, Cause] = {
    "state-does-not-fit": Cause(
        "Parameters, gradients and optimizer state do not fit this device as they are sharded",
        (
            "sharding.strategy",
            "zero_optimization.stage",
            "fsdp_offload_params",
            "use_distributed_optimizer",
        ),
        (
            Change(
                "shard more: FULL_SHARD / ZeRO-3 / distributed optimizer, or over more ranks",
                saves_text="mixed-precision Adam keeps 16 bytes a parameter: 16 psi "
                "becomes 16 psi / N",
                cost="one all-gather per unit in forward and in backward",
            ),
            Change(
                "load without a full copy on every rank (meta device, low_cpu_mem_usage, "
                "cpu_ram_efficient_loading)",
                saves_text="one full copy of the model while loading",
            ),
            Change(
                "offload optimizer state to the host, or train adapters (LoRA)",
                saves_text="12 bytes a parameter per shard (fp32 master copy and "
                "Adam's two moments)",
                cost="slower optimizer step",
            ),
        ),
        "`fsdp-doctor estimate CONFIG --world-size N`: bytes of the state per rank "
        "before any activation",
        seen="Parameters, gradients and optimizer state hold {held_state} of {held}",
    ),
    "activations": Cause(
        "Activations of forward, kept for backward, fill the device",
        ("batch.micro", "sequence_length", "activation_checkpointing", "recompute_granularity"),
        (
            Change(
                "activation checkpointing (recompute) of every layer",
                saves="held_activations",
                saves_text="most of allocated minus resident state",
                cost="about a third more compute in a step",
            ),
            Change(
                "a smaller micro batch, more accumulation",
                saves_text="in proportion",
                cost="less efficient kernels",
            ),
            Change(
                "a shorter sequence, or sequence/context parallelism; cap or bucket lengths",
                saves_text="in proportion to the tokens of a rank",
            ),
        ),
        "one step with half the micro batch (activations halve, state does not), or a memory "
        "snapshot at the peak",
        seen="Activations, kept from forward for backward, hold {held_activations} of {held}",
    ),
    "logits": Cause(
        "Vocabulary-sized buffers of the loss: {request} were asked for where logits are handled",
        ("loss chunking", "log_prob_max_token_len_per_gpu", "batch.micro"),
        (
            Change(
                "a chunked or fused linear cross-entropy (chunked entropy)",
                saves="requested",
                saves_text=None,
                cost="none to little",
            ),
            Change(
                "fewer tokens in a micro batch",
                saves_text="in proportion: tokens x vocabulary x 4 bytes a copy",
            ),
        ),
        "tokens x vocabulary x 4 bytes against the failed request",
        seen="Logits and what the loss makes of them hold {held_logits} of {held}",
    ),
    "fragmentation": Cause(
        "The pool is fragmented: {idle} lie idle in it, {request} were asked for",
        ("PYTORCH_CUDA_ALLOC_CONF",),
        (
            Change(
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (in place of max_split_size_mb)",
                saves="idle",
                cost="none in most jobs; not with every CUDA IPC use",
                replay="expandable_segments:True",
            ),
            Change("pad or bucket batches to few lengths", saves_text="part of the idle memory"),
        ),
        "a memory snapshot: the largest free block in the pool against the request",
    ),
    "optimizer-temporaries": Cause(
        "The optimizer step makes temporary copies as large as the state it updates",
        ("optim.fused", "optim.foreach"),
        (
            Change(
                "fused=True (or foreach=False)",
                saves_text="up to one copy of the sharded parameters (4 bytes each)",
                cost="foreach=False: a slower optimizer step",
            ),
            Change("shard over more ranks", saves_text="in proportion"),
        ),
        "whether it is the first step (state is created) or a later one; `fused=True` for one step",
    ),
    "communication-buffers": Cause(
        "Buffers of collectives (gathered units, gradient buckets) do not fit beside the rest",
        (
            "bucket_cap_mb",
            "reduce_bucket_size",
            "limit_all_gathers",
            "forward_prefetch",
            "overlap_param_gather",
        ),
        (
            Change(
                "smaller buckets or units, no prefetch",
                saves_text="the size of a bucket or unit each",
                cost="less overlap",
            ),
            Change("gradient_as_bucket_view=True (DDP)", saves_text="one copy of the gradients"),
        ),
        "a memory snapshot: all-gather and reduce-scatter buffers alive at the peak",
        seen="Gathered parameters and communication buffers hold {held_gathered} of {held}",
    ),
    "gradient-sync": Cause(
        "Gradients are kept whole between micro batches (no_sync)",
        ("no_sync", "gradient_accumulation_steps", "sync_each_batch"),
        (
            Change(
                "synchronise every micro batch (sync_each_batch=True)",
                saves_text="whole minus sharded gradients: 2 or 4 bytes a parameter x (1 - 1/N)",
                cost="one reduce-scatter per micro batch",
            ),
        ),
        "peak with accumulation 1 against the same with no_sync",
        seen="Gradients that are not sharded hold {held_whole_gradients} of {held}",
    ),
    "stream-reuse": Cause(
        "Blocks freed on one stream cannot be used on another yet",
        ("limit_all_gathers", "TORCH_NCCL_AVOID_RECORD_STREAMS"),
        (
            Change(
                "limit_all_gathers=True; TORCH_NCCL_AVOID_RECORD_STREAMS=1",
                saves_text="active minus allocated",
            ),
        ),
        "torch.cuda.memory_summary(): active memory well above allocated",
    ),
    "wrap-granularity": Cause(
        "A sharding unit is too large, or holds frozen and trainable parameters together",
        ("auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "use_orig_params"),
        (
            Change(
                "wrap every transformer layer; frozen and trainable parameters apart",
                saves_text="the whole gradient of the frozen part, per unit",
            ),
        ),
        "the list of FSDP units and their sizes",
    ),
    "unsharded-copy": Cause(
        "A second, unsharded copy of the model (EMA, reference model) is on the device",
        ("ema", "ref_model"),
        (
            Change(
                "shard or offload the second model as the first",
                saves_text="2 or 4 bytes a parameter x (1 - 1/N)",
            ),
        ),
        "bytes of every model on a rank after set-up",
        seen="A second copy of the model holds {held_copies} of {held}",
    ),
    "precision-upcast": Cause(
        "A tensor is copied to fp32",
        ("torch_dtype", "mixed_precision", "upcast"),
        (
            Change(
                "keep it in bf16, or upcast in pieces", saves_text="4 bytes an element of the copy"
            ),
        ),
        "dtypes of the parameters after set-up",
    ),
    "fp8-copies": Cause(
        "FP8 training keeps transposed or high-precision copies of the weights",
        ("fp8", "fp8_recipe", "keep_fp8_weight_transpose_cache", "fp8_param_gather"),
        (
            Change(
                "FP8 primary weights, no transpose cache", saves_text="1 to 3 bytes a parameter"
            ),
            Change(
                "bf16 for a comparison, or a smaller micro batch", cost="slower matrix products"
            ),
        ),
        "the same step in bf16: allocated after forward",
    ),
    "cuda-graph-pools": Cause(
        "CUDA graphs keep private pools: static buffers of every captured part",
        ("cuda_graph", "enable_cuda_graph", "cuda_graph_scope"),
        (
            Change(
                "no CUDA graphs, or fewer captured modules",
                saves="private",
                saves_text="the private pools",
                cost="more launch overhead",
            ),
        ),
        "the same step without graphs, or private pools in a memory snapshot",
    ),
    "checkpoint-copies": Cause(
        "Saving or loading a checkpoint makes full copies of the state",
        ("state_dict_type", "offload_to_cpu", "rank0_only", "async_save"),
        (
            Change(
                "sharded checkpoints (SHARDED_STATE_DICT, torch.distributed.checkpoint)",
                saves_text="full minus sharded state: up to 16 bytes a parameter",
                cost="a conversion where one file is needed",
            ),
            Change(
                "offload_to_cpu=True and rank0_only=True for a full state dict",
                saves_text="all of the full copy on the device",
                cost="host memory of one rank",
            ),
        ),
        "memory of device and host just before and in the save",
    ),
    "evaluation-accumulation": Cause(
        "Evaluation keeps the outputs of all batches",
        ("eval_accumulation_steps", "prediction_loss_only", "per_device_eval_batch_size"),
        (
            Change(
                "prediction_loss_only=True, or preprocess_logits_for_metrics",
                saves_text="samples x tokens x vocabulary x 4 bytes",
            ),
            Change("a smaller evaluation batch; eval_accumulation_steps", cost="host memory"),
        ),
        "memory over the batches of an evaluation: growing is accumulation",
    ),
    "leak": Cause(
        "Memory grows over time: references are kept",
        ("retained losses, outputs or hooks",),
        (
            Change(
                "drop references: detach() or item() what is logged, leave `except` "
                "blocks before a retry",
                saves_text="all that grew",
            ),
        ),
        "two snapshots some steps apart: stacks whose bytes grew",
        seen="Memory grows by {kept_per_step} a step: references are kept",
    ),
    "library-allocation": Cause(
        "A library (NCCL, cuBLAS, cuDNN, context) found no memory outside PyTorch's pool",
        ("NCCL_BUFFSIZE", "CUBLAS_WORKSPACE_CONFIG", "torch.cuda.set_per_process_memory_fraction"),
        (
            Change(
                "leave room: a smaller micro batch, or set_per_process_memory_fraction(0.9)",
                saves_text="0.5 to 3 GiB for communicators and workspaces",
            ),
            Change(
                "create communicators and handles before the pool fills (a "
                "collective and a matmul at start)"
            ),
        ),
        "free device memory (nvidia-smi) at that moment against PyTorch's reserved",
    ),
    "foreign-process": Cause(
        "Other processes hold {others} of this device",
        ("CUDA_VISIBLE_DEVICES", "torch.cuda.set_device(local_rank)", "srun --exclusive"),
        (
            Change(
                "bind every rank to its own device before anything touches CUDA",
                saves="others",
                saves_text="the other processes' share",
            ),
            Change(
                "ask the scheduler for the whole node or GPU (--exclusive); end leftover processes"
            ),
        ),
        "`nvidia-smi` on the host: which processes hold the device",
    ),
    "pinned-memory": Cause(
        "Pinning host memory failed (offload, data loader), which reads like a device error",
        (
            "offload_optimizer.pin_memory",
            "offload_param.pin_memory",
            "fsdp_offload_params",
            "dataloader_pin_memory",
        ),
        (
            Change(
                "pin_memory=false, or no offload",
                saves_text="the pinned buffers",
                cost="slower copies to the device",
            ),
            Change("raise `ulimit -l` and the container's memory limit"),
        ),
        "the frames of the failing call, `ulimit -l`, free host memory",
    ),
    "host-memory": Cause(
        "The host ran out of memory and a process was killed",
        (
            "low_cpu_mem_usage",
            "cpu_ram_efficient_loading",
            "offload_optimizer",
            "dataloader_num_workers",
        ),
        (
            Change(
                "load once per node, not once per rank (cpu_ram_efficient_loading "
                "with sync_module_states)",
                saves_text="(ranks per node - 1) x size of the model",
            ),
            Change("less offload to the host, fewer data loader workers"),
            Change("ask for more memory (--mem, resources.limits.memory)"),
        ),
        "`dmesg`, `sacct -o MaxRSS`, or the pod's status: was it the OOM killer",
    ),
    "memory-limit": Cause(
        "A limit of the process was reached, not the device's end",
        ("torch.cuda.set_per_process_memory_fraction", "PYTORCH_CUDA_ALLOC_CONF"),
        (Change("raise or drop the limit (set_per_process_memory_fraction)"),),
        "the fraction that the job sets",
        remark=True,
    ),
    "find-unused-parameters": Cause(
        "find_unused_parameters=True walks the whole graph every step and finds nothing",
        ("find_unused_parameters",),
        (Change("find_unused_parameters=False", saves_text="one traversal of the graph a step"),),
        "step time with and without the flag",
    ),
    "not-device-memory": Cause(
        "This is no shortage of device memory",
        ("--shm-size", "num_workers"),
        (
            Change("shared memory: --shm-size=8g or --ipc=host, fewer workers"),
            Change("a size beyond 1 EB: look for the failed collective or damaged file before it"),
            Change("kernel resources: smaller blocks or fewer stages"),
        ),
        "the first failure in the logs of all ranks",
    ),
}
