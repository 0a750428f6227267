"""gpt-neox: DeepSpeed under Megatron's model keys.

Source: gpt-neox ea7aefd8 (2026-05-19): megatron/neox_arguments/arguments.py, deepspeed_args.py.
"""

from __future__ import annotations

from fsdp_doctor.config.resolvers import deepspeed
from fsdp_doctor.config.resolvers.draft import HIDDEN, Draft
from fsdp_doctor.config.resolvers.words import as_bool, as_int, as_number, dtype
from fsdp_doctor.model.config import EffectiveConfig, NativeConfig

FRAMEWORKS: tuple[str, ...] = ("gpt-neox",)
ASSUMED: dict[str, str] = {"gpt-neox": "0.14.0"}
_MODEL = {
    "model.layers": "num_layers",
    "model.hidden": "hidden_size",
    "model.heads": "num_attention_heads",
    "model.kv_heads": "num_kv_heads",
    "batch.seq_len": "seq_length",
}


def resolve(native: NativeConfig, version: str | None) -> EffectiveConfig:
    """Return the effective config of a gpt-neox YAML; ``version`` is DeepSpeed's."""
    draft = Draft(native, version)
    hidden = as_int(draft.raw("hidden_size", HIDDEN))
    half = dtype(draft.raw("precision"))
    defaults = {
        "bf16.enabled": half == "bfloat16",
        "fp16.enabled": half == "float16",
        "gradient_clipping": 1.0,
        "zero_optimization.stage": 0,
    }
    launcher = deepspeed.Launcher(
        defaults=defaults, hidden=hidden, reason="gpt-neox runs DeepSpeed"
    )
    draft.claim("precision")
    deepspeed.apply(draft, version, launcher)
    if half is not None:
        value = draft.values["precision.compute"].value
        draft.put("precision.compute", value, ("precision", "fp16.enabled", "bf16.enabled"))
    if as_bool(draft.raw("fp32_allreduce")):
        draft.put("precision.reduce", "float32", "fp32_allreduce")
    for key, name in _MODEL.items():
        if draft.has(name):
            draft.take(key, name, None, as_int)
    tied = not as_bool(draft.raw("no_weight_tying"))
    draft.put("model.tied_embeddings", tied, "no_weight_tying")
    draft.take("parallel.tp", "model_parallel_size", 1, as_int)
    draft.take("parallel.pp", "pipe_parallel_size", 0, as_int)
    draft.take("parallel.sp", "sequence_parallel", False, as_bool)
    _recompute(draft)
    draft.take("optimizer.weight_decay", "weight_decay", 0.1, as_number)
    draft.drop_section("fp16.", "loss scaling has no say in memory or time")
    return draft.finish()


def _recompute(draft: Draft) -> None:
    on = as_bool(draft.raw("checkpoint_activations"))
    draft.put("recompute.mode", "full" if on else "none", "checkpoint_activations")
    draft.take("recompute.granularity", "checkpoint_num_layers", 1, as_int)
    draft.take("recompute.partition_activations", "partition_activations", False, as_bool)
    if not on:
        for key in ("recompute.granularity", "recompute.partition_activations"):
            draft.inert(key, "checkpoint_activations is off")
