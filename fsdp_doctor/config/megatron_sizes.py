"""Parameters of a GPT in Megatron's shape, from an effective config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdp_doctor.config.sizes import DTYPE_BYTES
from fsdp_doctor.model.config import ConfigValue
from fsdp_doctor.model.run import ModelSizes

Fields = Mapping[str, ConfigValue]
_FP8_BYTES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronShape:
    """Shape of the model, every default filled in."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    channels: int
    ffn: int
    vocab: int
    tied: bool
    gated: bool
    positions: int
    """Learned position embeddings, or 0."""
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    """Layers without experts; all where there are none."""

    @property
    def attention(self) -> int:
        """Elements of one layer's attention and norms: q, k, v, projection, two norms."""
        width = self.heads * self.channels
        keys = self.kv_heads * self.channels
        return 2 * self.hidden * (width + keys) + 2 * self.hidden

    def mlp(self, width: int) -> int:
        """Elements of a feed-forward of ``width``; a gated one has three matrices."""
        return (3 if self.gated else 2) * self.hidden * width

    @property
    def embedding(self) -> int:
        """Elements of the word embedding and of learned positions."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def head(self) -> int:
        """Elements of the output layer, 0 where it shares the embedding's."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def expert_layer(self) -> int:
        """Elements of all experts of one layer."""
        return self.experts * self.mlp(self.expert_ffn)

    @property
    def dense(self) -> int:
        """Elements of all layers without their experts."""
        with_experts = self.layers - self.dense_layers
        router = self.hidden * self.experts + (self.mlp(self.shared_ffn) if self.shared_ffn else 0)
        return (
            self.layers * self.attention
            + self.dense_layers * self.mlp(self.ffn)
            + with_experts * router
        )

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        with_experts = self.layers - self.dense_layers
        return self.dense + with_experts * self.expert_layer + self.embedding + self.head

    @property
    def layer(self) -> int:
        """Elements of the largest layer."""
        mlp = self.expert_layer if self.experts else self.mlp(self.ffn)
        return self.attention + mlp


def megatron_shape(fields: Fields) -> MegatronShape | None:
    """Return the shape that an effective config describes, or None when a size is not known."""
    sizes = {name: _number(fields, f"model.{name}") for name in _NEEDED}
    if any(size is None or size < 1 for size in sizes.values()):
        return None
    known: dict[str, int] = {name: size for name, size in sizes.items() if size is not None}
    heads = known["heads"]
    learned = _value(fields, "model.position_embedding") == "learned_absolute"
    experts = _number(fields, "moe.experts") or 0
    layers = known["layers"]
    return MegatronShape(
        layers=layers,
        hidden=known["hidden"],
        heads=heads,
        kv_heads=_number(fields, "model.kv_heads") or heads,
        channels=_number(fields, "model.kv_channels") or max(known["hidden"] // heads, 1),
        ffn=known["ffn"],
        vocab=known["vocab"],
        tied=bool(_value(fields, "model.tied_embeddings")),
        gated=bool(_value(fields, "model.gated")),
        positions=(_number(fields, "model.max_positions") or 0) if learned else 0,
        experts=experts,
        expert_ffn=_number(fields, "moe.ffn") or known["ffn"],
        shared_ffn=_number(fields, "moe.shared_ffn") or 0,
        dense_layers=_dense_layers(layers, experts, _value(fields, "moe.layer_frequency")),
    )


def model_sizes_from_megatron(fields: Fields) -> ModelSizes | None:
    """Return the whole model's sizes, or None when its shape is not known.

    Units are what Megatron-FSDP wraps: the layers; what is outside them comes first.
    """
    shape = megatron_shape(fields)
    if shape is None:
        return None
    width = storage_bytes(fields) or 2
    outside = shape.embedding + shape.head
    per_layer, rest = divmod(shape.parameters - outside, shape.layers)
    return ModelSizes(
        parameters=shape.parameters,
        parameter_bytes=shape.parameters * width,
        unit_parameters=(outside + rest, *[per_layer] * shape.layers),
    )


def storage_bytes(fields: Fields) -> int | None:
    """Return the bytes of a stored parameter, or None when its dtype is not known."""
    return dtype_bytes(_value(fields, "precision.param_storage"))


def dtype_bytes(name: Any) -> int | None:
    """Return the bytes of an element; 0 for ``none``."""
    if name == "none":
        return 0
    return _FP8_BYTES if name == "fp8" else DTYPE_BYTES.get(str(name))


_NEEDED = ("layers", "hidden", "heads", "ffn", "vocab")


def _dense_layers(layers: int, experts: int, frequency: Any) -> int:
    """Layers without experts: ``moe_layer_freq`` is every n-th, or a list of 0 and 1."""
    if not experts:
        return layers
    if isinstance(frequency, (list, tuple)):
        return max(layers - sum(1 for one in frequency if one == 1), 0)
    every = frequency if isinstance(frequency, int) and frequency > 0 else 1
    return layers - -(-layers // every)


def _value(fields: Fields, key: str) -> Any:
    field = fields.get(key)
    return None if field is None else field.value


def _number(fields: Fields, key: str) -> int | None:
    value = _value(fields, key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
