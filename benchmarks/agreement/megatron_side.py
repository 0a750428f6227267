"""megatron-core: its config classes, and its wrappers on one CPU process of a pretended group.

Megatron-LM's own argument code is no part of the package. What it hands to the classes is read
here from the command line: each flag by the name of the class's field, or as ``_RENAMED`` says.
Where its defaults are not those of the classes, a field is compared only where the flag is given.

The wrappers run on torch's "fake" process group. Replaced are CUDA's device, streams and random
state, NCCL's allocator, the memory of double buffers, the check of Megatron-FSDP's shards against
those of other ranks, and Transformer Engine's optimizer, of which only the signature is read here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any
from unittest import mock

from agreement.base import Case, dtype_name
from agreement.megatron_lines import LINES, MODEL, launch

Given = Mapping[str, Any]
_LIVE = ("optim_grads", "optim_grads_params")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
_RENAMED: dict[str, tuple[str, ...]] = {
    "ddp_bucket_size": ("bucket_size",),
    "ddp_average_in_collective": ("average_in_collective",),
    "ddp_pad_buckets_for_high_nccl_busbw": ("pad_buckets_for_high_nccl_busbw",),
    "ddp_reduce_scatter_with_fp32_accumulation": ("reduce_scatter_with_fp32_accumulation",),
    "use_nccl_ub": ("nccl_ub",),
    "fp8_format": ("fp8",),
    "fp8_param_gather": ("fp8_param_gather", "fp8_param"),
    "num_experts": ("num_moe_experts",),
    "swiglu": ("gated_linear_unit",),
    "num_virtual_stages_per_pipeline_rank": ("virtual_pipeline_model_parallel_size",),
}
_NOT_THE_CLASSES = frozenset(
    {"micro_batch_size", "global_batch_size", "seq_length", "max_position_embeddings"}
    | {"train_iters", "vocab_size", "group_query_attention", "ckpt_format"}
    | {"accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "recompute_activations"}
)


def cases() -> Iterator[Case]:
    """Yield Megatron-LM command lines."""
    installed = version("megatron-core")
    for name, (ranks, flags, since) in LINES.items():
        if _numbers(installed) >= since:
            yield Case(
                name=name,
                config={},
                text=launch(ranks, flags),
                fmt="megatron_shell",
                theirs=partial(_fields, ranks, flags),
                versions={"megatron-core": installed},
            )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _given(flags: str) -> dict[str, Any]:
    """Return what a command line gives, by the names of the classes' fields."""
    found: dict[str, Any] = {}
    words = f"{MODEL} {flags}".split()
    for i, word in enumerate(words):
        if word.startswith("--"):
            rest = words[i + 1 :]
            end = next((n for n, other in enumerate(rest) if other.startswith("--")), len(rest))
            flag = word.removeprefix("--").replace("-", "_")
            values = [_value(flag, text) for text in rest[:end]]
            many = flag in ("recompute_modules", "offload_modules")
            for name in _RENAMED.get(flag, (flag,)):
                found[name] = values if many else values[0] if values else True
    found["grad_reduce_in_fp32"] = _sums_in_fp32(found)
    if found.pop("recompute_activations", False):
        found["recompute_granularity"] = "selective"
    return found


def _value(flag: str, text: str) -> Any:
    if flag.endswith("_dtype"):
        return None if text == "auto" else _torch_dtype(_DTYPES[text])
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _sums_in_fp32(found: Given) -> bool:
    """What Megatron-LM hands on: with bf16, float32 unless something narrower is asked for."""
    if found.get("accumulate_allreduce_grads_in_fp32"):
        return True
    narrow = found.get("main_grads_dtype", _torch_dtype("float32")) != _torch_dtype("float32")
    return bool(found.get("bf16")) and not narrow and not found.get("grad_reduce_in_bf16")


def _build(kind: type, given: Given) -> Any:
    """Build a config class from the given fields that it has; its own rules run."""
    known = {field.name for field in dataclasses.fields(kind)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return kind(**{name: value for name, value in given.items() if name in known})
        except AssertionError as error:
            raise ValueError(str(error)) from error


def _fields(ranks: int, flags: str) -> dict[str, Any]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    given = _given(flags)
    half = "bfloat16" if given.get("bf16") else "float16" if given.get("fp16") else "float32"
    dtype = _torch_dtype(half)
    given |= {"params_dtype": dtype, "pipeline_dtype": dtype}
    classes = (DistributedDataParallelConfig, OptimizerConfig, TransformerConfig)
    known = {field.name for kind in classes for field in dataclasses.fields(kind)}
    unread = set(given) - known - _NOT_THE_CLASSES
    if unread:
        raise TypeError(f"no class of the library has {sorted(unread)}")
    transformer = _build(TransformerConfig, given)
    with _optimizer_of_transformer_engine():
        optimizer = _build(OptimizerConfig, given)
    ddp = _build(DistributedDataParallelConfig, given)
    with _pretended_group(ranks, transformer, ddp):
        live = _wrapped(transformer, ddp, dtype)
        fields = _of_wrapper(live, ddp, given)
    return fields | _of_optimizer(optimizer, ddp) | _of_transformer(transformer, given)


@contextlib.contextmanager
def _optimizer_of_transformer_engine() -> Iterator[None]:
    """Let the precision-aware optimizer's check find the arguments that it looks for."""

    def adam(
        master_weight_dtype: Any,
        exp_avg_dtype: Any,
        exp_avg_sq_dtype: Any,
        use_decoupled_grad: Any,
    ) -> None:
        del master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad

    names = ("", ".pytorch", ".pytorch.optimizers")
    modules = {f"transformer_engine{n}": types.ModuleType(f"transformer_engine{n}") for n in names}
    vars(modules["transformer_engine.pytorch.optimizers"])["FusedAdam"] = adam
    vars(modules["transformer_engine"])["__version__"] = "2.1.0"
    with mock.patch.dict(sys.modules, modules):
        yield


@contextlib.contextmanager
def _pretended_group(ranks: int, transformer: Any, ddp: Any) -> Iterator[None]:
    """Be rank 0 of so many ranks; collectives do nothing."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=transformer.tensor_model_parallel_size,
            pipeline_model_parallel_size=transformer.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=transformer.virtual_pipeline_model_parallel_size,
            context_parallel_size=transformer.context_parallel_size,
            expert_model_parallel_size=transformer.expert_model_parallel_size,
            expert_tensor_parallel_size=transformer.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=ddp.num_distributed_optimizer_instances,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _wrapped(transformer: Any, ddp: Any, dtype: Any) -> Any:
    """Wrap a model of one unit as Megatron-LM would."""
    import torch
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    unit = type("Unit", (torch.nn.Linear,), {})
    model = torch.nn.Sequential(unit(128, 128, bias=False)).to(dtype)
    cpu = torch.device("cpu")
    from_group = adapter.DeviceMesh.from_group

    def empty(shape: Any, dtype: Any, *_: Any, **__: Any) -> Any:
        return torch.empty(shape, dtype=dtype)

    memory = types.SimpleNamespace(get_tensor=empty)

    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        return from_group(*args, **{**kwargs, "device_type": "cpu"})

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "Stream", mock.DEFAULT),
            (torch.cuda, "synchronize", mock.DEFAULT),
            (param_and_grad_buffer, "nccl_allocator", mock.DEFAULT),
            (param_and_grad_buffer, "validate_uneven_dtensor", mock.DEFAULT),
            (param_and_grad_buffer, "get_global_memory_buffer", lambda: memory),
            (adapter.FullyShardedDataParallel, "sync_rng_states_across_tp_group", mock.DEFAULT),
            (adapter.DeviceMesh, "from_group", on_cpu),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        if not isinstance(getattr(adapter, "TELinear", unit), type):
            stack.enter_context(mock.patch.object(adapter, "TELinear", torch.nn.Bilinear))
        device: Any = 0 if ddp.use_megatron_fsdp else cpu
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=device))
        if not ddp.use_megatron_fsdp:
            return DistributedDataParallel(transformer, ddp, model)
        sharded = ddp.data_parallel_sharding_strategy == "optim_grads_params"
        units = [unit] if sharded else None
        return adapter.FullyShardedDataParallel(
            transformer, ddp, model, fsdp_unit_modules=units, device=cpu
        )


def _of_wrapper(live: Any, ddp: Any, given: Given) -> dict[str, Any]:
    """Return what the wrapper made of the config, and of the groups."""
    from megatron.core import parallel_state

    fsdp = ddp.use_megatron_fsdp
    alone = "optim" if ddp.use_distributed_optimizer else "none"
    strategy = ddp.data_parallel_sharding_strategy if fsdp else alone
    strategy = "none" if strategy == "no_shard" else strategy
    plain = "megatron_distopt" if ddp.use_distributed_optimizer else "megatron_ddp"
    part = parallel_state.get_data_parallel_world_size(
        with_context_parallel=True, partial_data_parallel=True
    )
    fields: dict[str, Any] = {
        "sharding.impl": "megatron_fsdp" if fsdp else plain,
        "sharding.strategy": strategy,
        "sharding.shard_size": 1 if strategy == "none" else part,
        "parallel.dp": parallel_state.get_data_parallel_world_size(),
        "comm.overlap_grad_reduce": ddp.overlap_grad_reduce,
        "comm.average_in_collective": ddp.average_in_collective,
        "comm.user_buffers": ddp.nccl_ub,
        "comm.pad_buckets": ddp.pad_buckets_for_high_nccl_busbw,
        "comm.reduce_scatter_fp32_accumulation": ddp.reduce_scatter_with_fp32_accumulation,
    }
    if strategy != "none" or fsdp:
        fields["comm.overlap_param_gather"] = ddp.overlap_param_gather
    if strategy != "none":
        fields["sharding.instances"] = ddp.num_distributed_optimizer_instances
    if "virtual_pipeline_model_parallel_size" in given:
        fields["comm.align_param_gather"] = ddp.align_param_gather
    return fields | (_of_fsdp(live, ddp) if fsdp else _of_ddp(live, ddp, given))


def _of_ddp(live: Any, ddp: Any, given: Given) -> dict[str, Any]:
    buffer = live.buffers[0]
    fields: dict[str, Any] = {
        "precision.grad": dtype_name(buffer.grad_dtype),
        "precision.reduce": dtype_name(buffer.grad_data.dtype),
    }
    if "bucket_size" in given or given.get("context_parallel_size", 1) == 1:
        # without a size Megatron-LM asks for one itself, and counts context-parallel ranks too
        size = ddp.bucket_size
        width = buffer.grad_data.element_size()
        fields["comm.bucket_bytes"] = None if size is None else size * width
    return fields


def _of_fsdp(live: Any, ddp: Any) -> dict[str, Any]:
    group = live.param_and_grad_buffer.parameter_groups[0]
    fields: dict[str, Any] = {
        "comm.double_buffer": ddp.fsdp_double_buffer,
        "precision.grad": dtype_name(group.main_grad_buffer.dtype),
    }
    main = group.main_weight_buffer
    fields["precision.master"] = "none" if main is None else dtype_name(main.dtype)
    policy = getattr(live, "mp_policy", None)
    reduce = None if policy is None else policy.grad_comm_dtype
    fields["precision.reduce"] = dtype_name(reduce) or fields["precision.grad"]
    if ddp.data_parallel_sharding_strategy in _LIVE:
        fields["comm.unit_elems"] = live.module.suggested_RS_queue_capacity
    if ddp.num_distributed_optimizer_instances > 1:
        outer = ddp.outer_dp_sharding_strategy
        fields["sharding.outer"] = "none" if outer == "no_shard" else outer
    return fields


def _of_optimizer(optimizer: Any, ddp: Any) -> dict[str, Any]:
    adam = "adamw" if optimizer.decoupled_weight_decay else "adam"
    half = optimizer.bf16 or optimizer.fp16
    fields: dict[str, Any] = {
        "optimizer.kind": adam if optimizer.optimizer == "adam" else optimizer.optimizer,
        "optimizer.grad_clip": optimizer.clip_grad,
        "optimizer.learning_rate": optimizer.lr,
        "optimizer.weight_decay": optimizer.weight_decay,
        "optimizer.precision_aware": optimizer.use_precision_aware_optimizer,
        "precision.optim_states": _state(optimizer.exp_avg_dtype),
        "precision.optim_states_sq": _state(optimizer.exp_avg_sq_dtype),
        "offload.optimizer": "cpu" if optimizer.optimizer_cpu_offload else "none",
    }
    if not ddp.use_megatron_fsdp:
        fields["precision.master"] = dtype_name(optimizer.main_params_dtype) if half else "none"
    if optimizer.optimizer_cpu_offload:
        fields["offload.optimizer_fraction"] = optimizer.optimizer_offload_fraction
        fields["offload.optimizer_overlap"] = optimizer.overlap_cpu_optimizer_d2h_h2d
    return fields


def _state(dtype: Any) -> str | None:
    """Return a state's dtype; fp8 is kept as bytes."""
    name = dtype_name(dtype)
    return "fp8" if name == "uint8" else name


def _of_transformer(transformer: Any, given: Given) -> dict[str, Any]:
    half = "bfloat16" if transformer.bf16 else "float16" if transformer.fp16 else "float32"
    fields: dict[str, Any] = {
        "parallel.tp": transformer.tensor_model_parallel_size,
        "parallel.pp": transformer.pipeline_model_parallel_size,
        "parallel.cp": transformer.context_parallel_size,
        "parallel.ep": transformer.expert_model_parallel_size,
        "parallel.sp": transformer.sequence_parallel,
        "parallel.vpp": transformer.virtual_pipeline_model_parallel_size or 1,
        "comm.tp_overlap": transformer.tp_comm_overlap,
        "precision.compute": half,
        "precision.fp8": transformer.fp8 or "none",
        "precision.fp4": transformer.fp4 or "none",
        "precision.param_storage": "fp8" if transformer.fp8_param else half,
        "precision.residual_fp32": transformer.fp32_residual_connection,
        "recompute.mode": transformer.recompute_granularity or "none",
        "model.layers": transformer.num_layers,
        "model.hidden": transformer.hidden_size,
        "model.heads": transformer.num_attention_heads,
        "model.kv_heads": transformer.num_query_groups,
        "model.kv_channels": transformer.kv_channels,
        "model.gated": transformer.gated_linear_unit,
        "moe.experts": transformer.num_moe_experts,
        "init.cpu": transformer.use_cpu_initialization,
        "init.meta_device": transformer.init_model_with_meta_device,
        "megatron.deterministic": transformer.deterministic_mode,
        "attention.backend": transformer.attention_backend.name,
        "offload.activations": _activations(transformer),
    }
    if not transformer.gated_linear_unit or "ffn_hidden_size" in given:
        fields["model.ffn"] = transformer.ffn_hidden_size
    if transformer.fp8:
        fields["precision.fp8_recipe"] = str(transformer.fp8_recipe)
    if transformer.recompute_granularity == "selective":
        fields["recompute.modules"] = sorted(transformer.recompute_modules)
    if transformer.recompute_granularity == "full":
        fields["recompute.method"] = transformer.recompute_method
        fields["recompute.num_layers"] = transformer.recompute_num_layers
        fields["recompute.distribute_saved"] = bool(transformer.distribute_saved_activations)
    if transformer.fine_grained_activation_offloading:
        fields["offload.modules"] = sorted(transformer.offload_modules)
    if transformer.num_moe_experts is not None:
        fields["parallel.etp"] = transformer.expert_tensor_parallel_size
        for key, name in (("topk", "moe_router_topk"), ("ffn", "moe_ffn_hidden_size")):
            if name in given:
                fields[f"moe.{key}"] = getattr(transformer, name)
    return fields


def _activations(transformer: Any) -> str:
    if transformer.fine_grained_activation_offloading:
        return "modules"
    return "layers" if transformer.cpu_offloading else "none"
