"""Activations and logits of a Megatron job, in bytes of the most loaded rank.

Source: Korthikanti et al. 2022 (arXiv:2205.05198), tables 1 and 2, with the feed-forward's own
width instead of 4 h; megatron/training/theoretical_memory_usage.py for pipelines. Two bytes an
element, one for dropout masks; float32 jobs have twice that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_doctor.model.config import ConfigValue

Fields = Mapping[str, ConfigValue]
_UNFUSED = ("unfused", "local")


def activation_bytes(fields: Fields) -> int | None:
    """Return what forward saves for backward in all micro batches in flight."""
    sizes = _sizes(fields)
    if sizes is None:
        return None
    per_layer = _layer(fields, sizes)
    layers = sizes["layers"]
    kept = _kept(fields, sizes, per_layer)
    offloaded = _whole(fields, "offload.activation_layers") or 0
    share = max(1 - offloaded / max(layers, 1), 0.0)
    return int(kept * share * _interleaving(fields) * _width(fields) / 2)


def logit_bytes(fields: Fields) -> int | None:
    """Return logits and what the loss makes of them.

    Source: core/tensor_parallel/cross_entropy.py works in place on a float32 copy; its fused form
    is compiled, and a compiled function writes its results to a further float32 buffer; Transformer
    Engine's works in place on the logits.
    """
    sizes = _sizes(fields)
    vocab = _whole(fields, "model.vocab")
    if sizes is None or vocab is None:
        return None
    per_logit = {"none": 6, "native": 10, "te": 2}.get(
        str(_value(fields, "loss.cross_entropy_fusion")), 6
    )
    return sizes["tokens"] * vocab // sizes["tp"] * per_logit


def _sizes(fields: Fields) -> dict[str, int] | None:
    names = {
        "hidden": "model.hidden",
        "layers": "model.layers",
        "heads": "model.heads",
        "ffn": "model.ffn",
        "micro": "batch.micro",
        "length": "batch.seq_len",
    }
    found: dict[str, int] = {}
    for name, key in names.items():
        size = _whole(fields, key)
        if size is None or size < 1:
            return None
        found[name] = size
    for name in ("tp", "pp", "cp"):
        found[name] = _whole(fields, f"parallel.{name}") or 1
    found["tokens"] = found["micro"] * -(-found["length"] // found["cp"])
    return found


def _layer(fields: Fields, sizes: Mapping[str, int]) -> float:
    """Bytes that one layer saves for one micro batch."""
    tokens, hidden, tp = sizes["tokens"], sizes["hidden"], sizes["tp"]
    split = tp if _value(fields, "parallel.sp") is True else 1
    outer = 10 * tokens * hidden / split
    return outer + _attention(fields, sizes) + _feed_forward(fields, sizes)


def _attention(fields: Fields, sizes: Mapping[str, int]) -> float:
    tokens, tp = sizes["tokens"], sizes["tp"]
    linear = 8 * tokens * sizes["hidden"] / tp
    backend = _value(fields, "attention.backend")
    local = _value(fields, "model.implementation") == "local" and backend == "auto"
    modules = _value(fields, "recompute.modules") or []
    recomputed = _value(fields, "recompute.mode") == "selective" and "core_attn" in modules
    if recomputed or not (backend in _UNFUSED or local):
        return linear
    length = -(-sizes["length"] // sizes["cp"])
    return linear + 5 * sizes["heads"] * length * tokens / tp


def _feed_forward(fields: Fields, sizes: Mapping[str, int]) -> float:
    gate = 1.5 if _value(fields, "model.gated") else 1.0
    width, copies = sizes["ffn"], 1
    if _whole(fields, "moe.experts"):
        width = _whole(fields, "moe.ffn") or sizes["ffn"]
        copies = _whole(fields, "moe.topk") or 2
    modules = _value(fields, "recompute.modules") or []
    if _value(fields, "recompute.mode") == "selective":
        if {"mlp", "moe"} & set(modules):
            return 0.0
        if "moe_act" in modules:
            gate /= 2
    return 4 * gate * sizes["tokens"] * width * copies / sizes["tp"]


def _kept(fields: Fields, sizes: Mapping[str, int], per_layer: float) -> float:
    """Bytes of all layers and micro batches in flight; those of the first stage are the most."""
    flights = min(sizes["pp"], _whole(fields, "batch.accumulation") or sizes["pp"])
    stage = sizes["layers"] / sizes["pp"]
    if _value(fields, "recompute.mode") != "full":
        return per_layer * stage * flights
    divided = _value(fields, "parallel.sp") is True or _value(fields, "recompute.distribute_saved")
    entry = 2 * sizes["tokens"] * sizes["hidden"] / (sizes["tp"] if divided else 1)
    chunk = _whole(fields, "recompute.num_layers") or 1
    if _value(fields, "recompute.method") == "block":
        covered = min(chunk, stage)
        return (covered * entry + (stage - covered) * per_layer) * flights + per_layer
    return stage / chunk * entry * flights + min(chunk, stage) * per_layer


def _interleaving(fields: Fields) -> float:
    pp, vpp = _whole(fields, "parallel.pp") or 1, _whole(fields, "parallel.vpp") or 1
    return 1 + (pp - 1) / (pp * vpp) if vpp > 1 else 1.0


def _width(fields: Fields) -> int:
    return 4 if _value(fields, "precision.compute") == "float32" else 2


def _value(fields: Fields, key: str) -> Any:
    """A field's value where it acts."""
    field = fields.get(key)
    return field.value if field is not None and field.effective else None


def _whole(fields: Fields, key: str) -> int | None:
    value = _value(fields, key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
