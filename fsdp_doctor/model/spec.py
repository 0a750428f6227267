"""A profile spec: what is trained (workload) and how (config). One YAML file.

Field names of the strategy sections are the argument names of ``torch`` itself:
``torch.nn.parallel.DistributedDataParallel``, ``torch.distributed.fsdp.FullyShardedDataParallel``,
``torch.distributed.fsdp.fully_shard`` (torch 2.6 - 2.14); for Megatron see ``megatron_spec``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fsdp_doctor.model.megatron_spec import MegatronConfig, MegatronFSDPConfig

Dtype = Literal["float32", "bfloat16", "float16"]
CheckpointFormat = Literal["torch_dist", "fsdp_dtensor", "torch_dcp", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The built-in GPT by its shape, or the user's own model by import path."""

    layers: int = 4
    """Transformer blocks."""
    hidden: int = 256
    """Width of the residual stream."""
    heads: int = 8
    """Query heads; must divide ``hidden``."""
    kv_heads: int | None = None
    """Key/value heads; must divide ``heads``. None: as many as ``heads``."""
    ffn: int | None = None
    """Inner width of the SwiGLU feed-forward. None: 4 x ``hidden``."""
    vocab: int = 2048
    """Vocabulary size."""
    tied_embeddings: bool = False
    """Whether the output projection shares the embedding's weight."""
    factory: str | None = None
    """``package.module:function`` that returns a ``torch.nn.Module``; replaces the built-in GPT."""
    batch: str | None = None
    """``package.module:function`` called as ``f(micro_batch, sequence_length, device)``; returns
    the model's input: a tensor, a tuple (positional) or a dict (keyword arguments). Required with
    ``factory``."""
    loss: str | None = None
    """``package.module:function`` called as ``f(output, batch)``; returns a scalar tensor. None:
    the model's output is the loss, or has it as ``.loss`` or ``["loss"]``."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``factory``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained."""

    model: ModelSpec = field(default_factory=ModelSpec)
    micro_batch: int = 1
    """Sequences per rank and micro step."""
    sequence_length: int = 128
    """Tokens per sequence."""
    seed: int = 0
    """Of the weights (alike on every rank) and of the random tokens (different on each)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPConfig:
    """Arguments of ``torch.nn.parallel.DistributedDataParallel``."""

    bucket_cap_mb: float | None = None
    """Bucket size in MiB. None: torch's default (25, but 1 for the first bucket)."""
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    comm_hook: Literal["none", "fp16_compress", "bf16_compress"] = "none"
    """Gradient compression hook of ``torch.distributed.algorithms.ddp_comm_hooks``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """``torch.distributed.fsdp.MixedPrecision`` (FSDP1). None leaves a dtype as it is."""

    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None
    keep_low_precision_grads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUOffload:
    """``torch.distributed.fsdp.CPUOffload`` (FSDP1)."""

    offload_params: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """A 2-D device mesh (hybrid sharding): ``replicate`` x ``shard`` must equal the world size."""

    replicate: int
    shard: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP1Config:
    """Arguments of ``torch.distributed.fsdp.FullyShardedDataParallel``."""

    sharding_strategy: Literal[
        "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"
    ] = "FULL_SHARD"
    mixed_precision: MixedPrecision | None = None
    cpu_offload: CPUOffload | None = None
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST"] | None = "BACKWARD_PRE"
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    wrap: Literal["block", "none"] | list[str] = "block"
    """``block``: one unit per transformer block; ``none``: the whole model is one unit; a list:
    one unit per module of these class names. (Becomes ``auto_wrap_policy``.)"""
    mesh: MeshConfig | None = None
    """Required by HYBRID_SHARD and _HYBRID_SHARD_ZERO2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecisionPolicy:
    """``torch.distributed.fsdp.MixedPrecisionPolicy`` (FSDP2)."""

    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    output_dtype: Dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUOffloadPolicy:
    """``torch.distributed.fsdp.CPUOffloadPolicy`` (FSDP2)."""

    pin_memory: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP2Config:
    """Arguments of ``torch.distributed.fsdp.fully_shard``."""

    reshard_after_forward: bool | int | None = None
    """True, False, or the number of ranks to reshard to, for every unit, the root too. None:
    torch's default (True, except the root unit)."""
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: CPUOffloadPolicy | None = None
    mesh: MeshConfig | None = None
    """2-D mesh for HSDP. None: one dimension over all ranks."""
    wrap: Literal["block", "none"] | list[str] = "block"
    """As in FSDP1."""
    blocks_per_unit: int = 1
    """With ``wrap: block``: how many consecutive blocks make one unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Precision outside the sharding engine."""

    parameters: Dtype = "float32"
    """Dtype in which the model is built (``bfloat16`` is pure bf16: no fp32 master)."""
    autocast: Literal["bfloat16", "float16"] | None = None
    """dtype of ``torch.autocast``; None: off."""
    grad_scaler: bool = False
    """``torch.amp.GradScaler`` around the loss (needs autocast float16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing:
    """``torch.distributed.algorithms._checkpoint.checkpoint_wrapper`` around blocks."""

    mode: Literal["none", "full", "every_n", "selective"] = "none"
    """``selective``: matmul and attention outputs are saved, the rest is recomputed
    (``torch.utils.checkpoint.create_selective_checkpoint_contexts``)."""
    every_n: int = 2
    """With ``every_n``: each n-th block is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientAccumulation:
    """Micro steps before the optimizer runs."""

    steps: int = 1
    sync: Literal["every_microbatch", "last_microbatch"] = "every_microbatch"
    """``last_microbatch``: ``no_sync()`` (DDP, FSDP1) or ``set_requires_gradient_sync(False)``
    (FSDP2) on all but the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """``torch.optim.AdamW`` or ``torch.optim.SGD``."""

    name: Literal["adamw", "sgd"] = "adamw"
    implementation: Literal["default", "foreach", "fused", "for_loop"] = "default"
    """``default``: torch decides (foreach on CUDA, for_loop on CPU)."""
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    momentum: float = 0.0
    """SGD only."""
    max_grad_norm: float | None = None
    """Clip the gradient norm before the step; None: no clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How it is trained, in the words of the engine itself.

    Under ``megatron`` the sections precision, activation_checkpointing, optimizer and compile are
    not read: Megatron's own ``model`` and ``optimizer`` say it.
    """

    strategy: Literal["ddp", "fsdp1", "fsdp2", "megatron", "megatron_fsdp"]
    """``megatron``: Megatron-Core, its engine chosen by its own switches; ``megatron_fsdp``: the
    standalone package."""
    ddp: DDPConfig = field(default_factory=DDPConfig)
    fsdp1: FSDP1Config = field(default_factory=FSDP1Config)
    fsdp2: FSDP2Config = field(default_factory=FSDP2Config)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    megatron_fsdp: MegatronFSDPConfig = field(default_factory=MegatronFSDPConfig)
    precision: Precision = field(default_factory=Precision)
    activation_checkpointing: ActivationCheckpointing = field(
        default_factory=ActivationCheckpointing
    )
    gradient_accumulation: GradientAccumulation = field(default_factory=GradientAccumulation)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    compile: bool = False
    """``torch.compile`` each block, or the whole model where it has no list of blocks. On a CPU
    such a run is not observed (under a dispatch mode torch does not compile): it records times, no
    memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """How many steps run, and of which kind."""

    warmup: int = 5
    """Untimed steps before the timed ones; at least 3. The first 3 are observed; from 5 on at least
    2 more let the job settle before the clock counts."""
    timed: int = 10
    """Timed steps."""
    kernel_profile: bool = True
    """Whether one more untimed step runs under ``torch.profiler``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSpec:
    """Workload + config + world size."""

    name: str
    """What the run is called; a file without it is called as the file is."""
    config: TrainingConfig
    workload: Workload = field(default_factory=Workload)
    world_size: int = 2
    """Ranks."""
    steps: StepPlan = field(default_factory=StepPlan)
    checkpoint: CheckpointFormat | None = None
    """Format in which a checkpoint is saved and loaded after the timed steps; None: not at all.
    ``torch_dist``: Megatron's distributed checkpoint; ``fsdp_dtensor``: Megatron-FSDP's;
    ``torch_dcp``: ``torch.distributed.checkpoint`` of the sharded state; ``full``: the whole state
    gathered on rank 0 and written by ``torch.save``."""
