"""The part of a profile spec that speaks Megatron: its own sections and field names.

``dist``, ``ddp``, ``model``, ``optimizer`` and ``checkpoint`` are the sections of Megatron-Bridge;
their fields are those of Megatron-Core's ``DistributedDataParallelConfig``, ``TransformerConfig``
and ``OptimizerConfig`` (0.16 - 0.19), with Megatron's defaults unless the text says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

MegatronDtype = Literal["float32", "bfloat16", "float16"]
ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronDist:
    """Which engine wraps the model, besides ``ddp.use_distributed_optimizer``."""

    use_megatron_fsdp: bool = False
    """Megatron-FSDP; ``ddp.use_megatron_fsdp`` is the same switch."""
    use_torch_fsdp2: bool = False
    """Megatron's wrapper around torch's ``fully_shard``."""
    torch_fsdp2_reshard_after_forward: bool = True
    """Read with ``use_torch_fsdp2`` only."""
    use_gloo_process_groups: bool = True
    """Whether CPU process groups are made too (never under a fake process group)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronDDP:
    """Fields of ``megatron.core.distributed.DistributedDataParallelConfig``."""

    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    average_in_collective: bool = False
    bucket_size: int | None = None
    """Elements. None with overlap: max(40e6, 1e6 x data-parallel ranks), as Megatron sets it."""
    pad_buckets_for_high_nccl_busbw: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    check_for_nan_in_grad: bool = False
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: ShardingStrategy = "no_shard"
    """Read by Megatron-FSDP only."""
    outer_dp_sharding_strategy: Literal["no_shard", "optim"] = "no_shard"
    suggested_communication_unit_size: int | None = None
    """Elements in flight. None: at least 1e9 (to 0.19), so a small model is gathered whole."""
    fsdp_double_buffer: bool = False
    gradient_reduce_div_fusion: bool = True
    """Off on a CPU: gloo has no such reduction."""
    megatron_fsdp_main_params_dtype: MegatronDtype | Literal["auto"] | None = "float32"
    """From 0.17 on."""
    megatron_fsdp_main_grads_dtype: MegatronDtype | Literal["auto"] | None = None
    """From 0.17 on; None or auto: the parameters' dtype."""
    megatron_fsdp_grad_comm_dtype: MegatronDtype | Literal["auto"] | None = None
    """From 0.17 on; None or auto: the main gradients' dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronModel:
    """Fields of ``megatron.core.transformer.TransformerConfig`` that say how the model computes.

    Its shape is the workload's: ``layers`` is num_layers, ``kv_heads`` num_query_groups and so on.
    Layers are Megatron's local ones (no Transformer Engine, no Apex).
    """

    bf16: bool = False
    """False: float32."""
    add_bias_linear: bool = True
    gated_linear_unit: bool = False
    """SwiGLU."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    attention_softmax_in_fp32: bool = True
    fp32_residual_connection: bool = False
    cross_entropy_loss_fusion: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None
    """With ``selective``; None: core_attn."""
    init_model_with_meta_device: bool = False
    """Megatron-FSDP only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOptimizer:
    """Fields of ``megatron.core.optimizer.OptimizerConfig``."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """Without Apex and Transformer Engine: torch's AdamW and SGD."""
    lr: float = 1e-4
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    """0: the gradient norm is not even computed."""
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 0.0
    """Read with ``optimizer_cpu_offload`` only."""
    overlap_cpu_optimizer_d2h_h2d: bool = False
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronCheckpoint:
    """How a job would save; saved here only when the spec or ``--checkpoint`` asks for it."""

    ckpt_format: Literal["torch_dist", "fsdp_dtensor", "torch_dcp"] = "torch_dist"
    fully_parallel_save: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    """A Megatron-Core job, in Megatron's own words (``strategy: megatron``)."""

    dist: MegatronDist = field(default_factory=MegatronDist)
    ddp: MegatronDDP = field(default_factory=MegatronDDP)
    model: MegatronModel = field(default_factory=MegatronModel)
    optimizer: MegatronOptimizer = field(default_factory=MegatronOptimizer)
    checkpoint: MegatronCheckpoint = field(default_factory=MegatronCheckpoint)

    @property
    def engine(self) -> str:
        """``mcore_torch_fsdp2``, ``megatron_fsdp``, ``megatron_distopt`` or ``megatron_ddp``."""
        if self.dist.use_torch_fsdp2:
            return "mcore_torch_fsdp2"
        if self.dist.use_megatron_fsdp or self.ddp.use_megatron_fsdp:
            return "megatron_fsdp"
        return "megatron_distopt" if self.ddp.use_distributed_optimizer else "megatron_ddp"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFSDPConfig:
    """Arguments of the standalone ``megatron_fsdp.fully_shard_model`` (0.6).

    The model is the spec's own (built-in GPT or import path), the optimizer torch's.
    """

    zero_dp_strategy: ShardingStrategy = "optim_grads_params"
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    average_in_collective: bool = False
    fsdp_double_buffer: bool = False
    main_params_dtype: MegatronDtype | None = "float32"
    main_grads_dtype: MegatronDtype | None = None
    grad_comm_dtype: MegatronDtype | None = None
    wrap: Literal["block", "none"] | list[str] = "block"
    """``fsdp_unit_modules``: the classes of the blocks, none, or these class names."""
