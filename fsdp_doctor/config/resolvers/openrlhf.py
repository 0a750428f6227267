"""OpenRLHF: its flags become a DeepSpeed config.

Source: OpenRLHF openrlhf/utils/deepspeed/deepspeed_utils.py (get_train_ds_config), deepspeed.py,
cli/train_*.py (0a3fbcef and later). Flags have dotted names since d62d0e2 (2026-04-19).
"""

from __future__ import annotations

from fsdp_doctor.config.resolvers import deepspeed
from fsdp_doctor.config.resolvers.draft import HIDDEN, Draft
from fsdp_doctor.config.resolvers.words import as_bool, as_int, as_number, dtype, number_or_word
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("openrlhf",)
ASSUMED: dict[str, str] = {"openrlhf": "0.10"}
_RENAMED: dict[str, tuple[str, ...]] = {
    "zero_optimization.stage": ("ds.zero_stage", "zero_stage"),
    "zero_optimization.zero_hpz_partition_size": ("ds.zpg", "zpg"),
    "zero_optimization.overlap_comm": ("ds.overlap_comm", "overlap_comm"),
    "data_types.grad_accum_dtype": ("ds.grad_accum_dtype", "grad_accum_dtype"),
    "train_micro_batch_size_per_gpu": ("train.micro_batch_size", "micro_train_batch_size"),
    "train_batch_size": ("train.batch_size", "train_batch_size"),
}
"""DeepSpeed key -> the flag's names, today's first."""
_OFFLOAD = ("ds.adam_offload", "adam_offload")
_HALF = ("ds.param_dtype", "param_dtype", "bf16")
_CLIP = ("actor.max_norm", "model.max_norm", "max_norm")
_RECOMPUTE = (
    "actor.gradient_checkpointing_enable",
    "model.gradient_checkpointing_enable",
    "gradient_checkpointing",
)
_REENTRANT = (
    "actor.gradient_checkpointing_reentrant",
    "model.gradient_checkpointing_reentrant",
    "gradient_checkpointing_use_reentrant",
)
_DYNAMIC = ("train.dynamic_batch_enable", "use_dynamic_batch")
_LENGTH = ("data.max_len", "max_len")
_TOKENS = ("train.max_tokens_per_gpu", "train_max_tokens_per_gpu")
_NODES = ("actor.num_nodes", "actor_num_nodes", "launcher.nnodes")
_GPUS = (
    "actor.num_gpus_per_node", "actor_num_gpus_per_node",
    "launcher.nproc_per_node", "launcher.num_gpus",
)  # fmt: skip
_MODEL = ("actor.model_name_or_path", "model.model_name_or_path", "pretrain")


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of an OpenRLHF command, with the newest DeepSpeed's rules."""
    draft = Draft(native, version)
    inline = {key: _written(draft, names) for key, names in _RENAMED.items()}
    half = _half(draft)
    offload = as_bool(draft.raw(*_OFFLOAD))
    launcher = deepspeed.Launcher(
        inline=inline,
        defaults={
            "zero_optimization.stage": 2,
            "zero_optimization.zero_hpz_partition_size": 1,
            "zero_optimization.overlap_comm": False,
            "zero_optimization.offload_optimizer.device": "cpu" if offload else "none",
            "zero_optimization.offload_optimizer.pin_memory": True,
            "zero_optimization.offload_param.device": "none",
            "bf16.enabled": half == "bfloat16",
            "fp16.enabled": half == "float16",
            "gradient_clipping": 1.0,
            "train_micro_batch_size_per_gpu": 8,
            "train_batch_size": 128,
        },
        hidden=as_int(draft.raw(HIDDEN)),
        reason="OpenRLHF runs DeepSpeed",
    )
    deepspeed.apply(draft, deepspeed.ASSUMED["deepspeed"], launcher)
    for key, names in (
        ("precision.compute", _HALF),
        ("offload.optimizer", _OFFLOAD),
        ("optimizer.grad_clip", _CLIP),
    ):
        if draft.has(*names):
            value = draft.values[key].value
            draft.put(key, as_number(draft.raw(*names)) if names is _CLIP else value, names)
    draft.put("recompute.mode", "full" if as_bool(draft.raw(*_RECOMPUTE)) else "none", _RECOMPUTE)
    draft.take("recompute.reentrant", _REENTRANT, False, as_bool)
    if draft.values["recompute.mode"].value == "none":
        draft.inert("recompute.reentrant", "gradient checkpointing is off")
    draft.take("parallel.tp", ("ds.tensor_parallel_size", "ds_tensor_parallel_size"), 1, as_int)
    draft.take("parallel.cp", ("ds.ring_attn_size", "ring_attn_size"), 1, as_int)
    _batch(draft)
    if draft.has(*_MODEL):
        draft.take("model.name", _MODEL)
    draft.take("batch.packing", ("ds.packing_samples", "packing_samples"), False, as_bool)
    draft.take("compile.enabled", ("ds.deepcompile", "deepcompile"), False, as_bool)
    return draft.finish()


def _written(draft: Draft, names: tuple[str, ...]) -> str:
    """Return the name that is written, today's where none is."""
    return draft.find(*names) or names[0]


def _half(draft: Draft) -> str | None:
    """Return the dtype: of ``--param_dtype`` (bf16 unless written), once the switch ``--bf16``."""
    if draft.has("bf16"):
        return "bfloat16" if as_bool(draft.raw("bf16")) else "float32"
    return dtype(draft.raw(*_HALF[:2], default="bf16"))


def _batch(draft: Draft) -> None:
    """With dynamic batches the micro batch is whatever fits a number of tokens."""
    dynamic = as_bool(draft.raw(*_DYNAMIC))
    if dynamic:
        draft.put("batch.micro", "dynamic", _DYNAMIC, "as many samples as fit the tokens")
        draft.take("batch.micro_tokens", _TOKENS, 16192, as_int)
    else:
        draft.drop(_TOKENS, "read with dynamic batches only")
    draft.take("batch.seq_len", _LENGTH, None, number_or_word)
    _accumulation(draft, dynamic)


def _accumulation(draft: Draft, dynamic: bool) -> None:
    """DeepSpeed gets the whole batch and the micro batch; the steps follow from the ranks."""
    nodes, each = (as_int(draft.raw(*names)) for names in (_NODES, _GPUS))
    ranks = None if each is None else each * (nodes or 1)
    if ranks is not None:
        draft.take("world.nodes", _NODES, 1, as_int)
        draft.put("world.size", ranks, (*_GPUS, *_NODES))
    natives = (*_RENAMED["train_batch_size"], *_RENAMED["train_micro_batch_size_per_gpu"])
    total, micro = (draft.values[key].value for key in ("batch.global", "batch.micro"))
    if dynamic:
        draft.derive("batch.accumulation", None, _DYNAMIC, "as many as the samples fill")
    elif ranks and isinstance(total, int) and isinstance(micro, int) and micro > 0:
        split = draft.values["parallel.tp"].value * draft.values["parallel.cp"].value
        steps = max(total * split // micro // ranks, 1)
        draft.derive("batch.accumulation", steps, natives, "train batch / micro batch / ranks")
    else:
        draft.derive("batch.accumulation", None, natives, "depends on the number of ranks")
