"""Parallel sizes, batch, model shape, checkpoints and kernels of a Megatron job."""

from __future__ import annotations

from typing import Any

from fsdp_doctor.config.resolvers.mcore_settings import Settings
from fsdp_doctor.config.resolvers.mcore_sharding import data_parallel_ranks, world_size

_TP, _PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_CP, _EP = "context_parallel_size", "expert_model_parallel_size"
_WORLD = ("world_size", "launcher.nproc_per_node", "launcher.nnodes", "launcher.num_gpus")
_GPT2_WORDS = 50257


def parallel_fields(settings: Settings) -> None:
    """Set ``parallel.*`` and ``world.size``."""
    for key, name in (("tp", _TP), ("pp", _PP), ("cp", _CP), ("ep", _EP)):
        size = settings.get(name)
        settings.take(f"parallel.{key}", name, 1 if size is None else size)
    tp = settings.number(_TP) or 1
    etp = settings.number("expert_tensor_parallel_size")
    settings.take(
        "parallel.etp",
        "expert_tensor_parallel_size",
        etp if etp is not None else tp,
        also=(_TP,),
        reason=None if etp is not None else "as the tensor-parallel size",
    )
    if settings.get("num_experts") is None:
        settings.inert("parallel.etp", "no experts")
    settings.take("parallel.sp", "sequence_parallel", settings.on("sequence_parallel"))
    _virtual_stages(settings)
    settings.claim("data_parallel_size", *_WORLD)
    name = next((n for n in _WORLD if settings.field(n) is not None), "world_size")
    settings.take("world.size", name, world_size(settings), also=_WORLD)
    ranks = data_parallel_ranks(settings, with_context=False)
    settings.derive(
        "parallel.dp",
        ranks,
        (*_WORLD, _TP, _PP, _CP, "data_parallel_size"),
        "ranks / (tensor x pipeline x context)",
    )


def _virtual_stages(settings: Settings) -> None:
    name = "virtual_pipeline_model_parallel_size"
    stages = settings.number(name)
    per_stage = settings.number("num_layers_per_virtual_pipeline_stage")
    layers, pp = settings.number("num_layers"), settings.number(_PP) or 1
    given = "num_virtual_stages_per_pipeline_rank"
    per_virtual = "num_layers_per_virtual_pipeline_stage"
    if stages is None and settings.number(given):
        name, stages = given, settings.number(given)
    elif stages is None and per_stage and layers:
        name, stages = per_virtual, layers // pp // per_stage
    settings.claim("virtual_pipeline_model_parallel_size", given)
    settings.claim(per_virtual)
    settings.take("parallel.vpp", name, stages or 1, also=(given, per_virtual, _PP))


def batch_fields(settings: Settings) -> None:
    """Set ``batch.*``; accumulation follows from the sizes."""
    settings.take("batch.micro", "micro_batch_size")
    micro = settings.number("micro_batch_size")
    ranks = data_parallel_ranks(settings, with_context=False)
    whole = settings.number("global_batch_size")
    if whole is None and settings.get("global_batch_size") is None and micro and ranks:
        whole = micro * ranks
        why = "not set: micro batch x data-parallel size"
        settings.derive("batch.global", whole, ("micro_batch_size", *_WORLD, _TP, _PP, _CP), why)
        settings.claim("global_batch_size")
    else:
        settings.take("batch.global", "global_batch_size")
    steps = None
    if whole and micro and ranks and whole % (micro * ranks) == 0:
        steps = whole // (micro * ranks)
    natives = ("global_batch_size", "micro_batch_size", *_WORLD, _TP, _PP, _CP)
    settings.derive(
        "batch.accumulation", steps, natives, "global batch / (micro batch x data-parallel size)"
    )
    length = "seq_length"
    if settings.get(length) is None and settings.get("encoder_seq_length") is not None:
        length = "encoder_seq_length"
    settings.take("batch.seq_len", length)
    settings.take("batch.rampup", "rampup_batch_size")


def model_fields(settings: Settings) -> None:
    """Set ``model.*``, ``attention.*``, ``loss.*`` and ``moe.*``."""
    heads = settings.number("num_attention_heads")
    layers = "num_layers" if settings.get("num_layers") is not None else "encoder_num_layers"
    settings.take("model.layers", layers)
    settings.take("model.hidden", "hidden_size")
    settings.take("model.heads", "num_attention_heads")
    _head_width(settings, heads)
    grouped = settings.on("group_query_attention") or settings.native.framework != "megatron-lm"
    groups = settings.number("num_query_groups") if grouped else None
    settings.take(
        "model.kv_heads",
        "num_query_groups",
        groups or heads,
        also=("group_query_attention", "num_attention_heads"),
    )
    settings.claim("group_query_attention")
    _feed_forward(settings)
    _vocabulary(settings)
    untied = settings.on("untie_embeddings_and_output_weights")
    settings.take("model.tied_embeddings", "untie_embeddings_and_output_weights", not untied)
    settings.take("model.max_positions", "max_position_embeddings")
    settings.take("model.position_embedding", "position_embedding_type")
    settings.take("model.implementation", "transformer_impl")
    backend = str(settings.get("attention_backend") or "auto")
    settings.take("attention.backend", "attention_backend", backend)
    fused = settings.on("cross_entropy_loss_fusion")
    kind = str(settings.get("cross_entropy_fusion_impl") or "native") if fused else "none"
    settings.take(
        "loss.cross_entropy_fusion",
        "cross_entropy_loss_fusion",
        kind,
        also=("cross_entropy_fusion_impl",),
    )
    settings.claim("cross_entropy_fusion_impl")
    for key, name in _EXPERTS.items():
        if settings.field(name) is not None or key == "moe.experts":
            settings.take(key, name)
            if settings.get("num_experts") is None and key != "moe.experts":
                settings.inert(key, "no experts: num_experts is not set")


def _head_width(settings: Settings, heads: int | None) -> None:
    hidden = settings.number("hidden_size")
    if settings.get("kv_channels") is not None or not hidden or not heads:
        settings.take("model.kv_channels", "kv_channels")
        return
    natives = ("kv_channels", "hidden_size", "num_attention_heads")
    settings.derive("model.kv_channels", hidden // heads, natives, "not set: hidden / heads")


def _feed_forward(settings: Settings) -> None:
    gated = settings.on("swiglu")
    settings.take("model.gated", "swiglu", gated)
    hidden, width = settings.number("hidden_size"), settings.get("ffn_hidden_size")
    if width is not None or hidden is None:
        settings.take("model.ffn", "ffn_hidden_size")
        return
    width = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    natives = ("ffn_hidden_size", "hidden_size", "swiglu")
    settings.derive(
        "model.ffn", width, natives, "not set: 4 x hidden, with SwiGLU two thirds of it"
    )
    settings.claim("ffn_hidden_size")


def _vocabulary(settings: Settings) -> None:
    padded = settings.number("padded_vocab_size")
    words = settings.number("vocab_size")
    tokenizer = settings.get("tokenizer_type")
    if padded is not None:
        settings.take("model.vocab", "padded_vocab_size", also=("vocab_size",))
    elif words is not None or tokenizer != "GPT2BPETokenizer":
        settings.take("model.vocab", "vocab_size")
    else:
        settings.derive("model.vocab", _GPT2_WORDS, ("tokenizer_type",), "GPT-2's byte pairs")


def other_fields(settings: Settings) -> None:
    """Set ``ckpt.*``, ``init.*``, ``compile.*``, ``megatron.*``, ``memory.*``."""
    settings.take("ckpt.format", "ckpt_format")
    settings.take("ckpt.async", "async_save", settings.on("async_save"))
    settings.take("ckpt.fully_parallel_save", "ckpt_fully_parallel_save")
    settings.take(
        "init.meta_device",
        "init_model_with_meta_device",
        settings.on("init_model_with_meta_device"),
    )
    settings.take("init.cpu", "use_cpu_initialization", settings.on("use_cpu_initialization"))
    settings.take(
        "megatron.gradient_accumulation_fusion",
        "gradient_accumulation_fusion",
        settings.on("gradient_accumulation_fusion"),
    )
    settings.take("megatron.manual_gc", "manual_gc", settings.on("manual_gc"))
    settings.take("megatron.deterministic", "deterministic_mode", settings.on("deterministic_mode"))
    settings.take("comm.cp_type", "cp_comm_type")
    settings.take("comm.cp_hierarchy", "hierarchical_context_parallel_sizes")
    settings.take("memory.empty_cache_level", "empty_unused_memory_level")
    settings.take("checks.nan_in_grad", "check_for_nan_in_loss_and_grad")
    graphs: Any = settings.get("cuda_graph_impl")
    name = "cuda_graph_impl"
    for older, kind in (("enable_cuda_graph", "local"), ("external_cuda_graph", "external")):
        if graphs in (None, "none") and settings.on(older):
            name, graphs = older, kind
    settings.claim("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph")
    also = ("enable_cuda_graph", "external_cuda_graph")
    settings.take("compile.cuda_graphs", name, graphs or "none", also=also)
    settings.claim("deprecated_use_mcore_models")
    if settings.is_written("deprecated_use_mcore_models"):
        settings.ignore(("deprecated_use_mcore_models",), "deprecated: has no effect any more")


_EXPERTS = {
    "moe.experts": "num_experts",
    "moe.topk": "moe_router_topk",
    "moe.ffn": "moe_ffn_hidden_size",
    "moe.layer_frequency": "moe_layer_freq",
    "moe.grouped_gemm": "moe_grouped_gemm",
    "moe.dispatcher": "moe_token_dispatcher_type",
    "moe.capacity_factor": "moe_expert_capacity_factor",
    "moe.pad_to_capacity": "moe_pad_expert_input_to_capacity",
    "moe.shared_ffn": "moe_shared_expert_intermediate_size",
    "moe.permute_fusion": "moe_permute_fusion",
}
