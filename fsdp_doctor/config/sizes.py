"""Sizes of the built-in GPT from its shape alone, without building it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_doctor.model.config import ConfigValue
from fsdp_doctor.model.run import ModelSizes

if TYPE_CHECKING:
    from fsdp_doctor.model.spec import ModelSpec, ProfileSpec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptShape:
    """Shape of the built-in GPT, every default filled in."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool

    @property
    def block_matrices(self) -> int:
        """Elements of one block's matrices: wq, wo, wk, wv, and the SwiGLU's w1, w2, w3."""
        key_value = self.kv_heads * (self.hidden // self.heads)
        return 2 * self.hidden * (self.hidden + key_value) + 3 * self.hidden * self.ffn

    @property
    def block(self) -> int:
        """Elements of one block: its matrices and two RMSNorm weights."""
        return self.block_matrices + 2 * self.hidden

    @property
    def root(self) -> int:
        """Elements outside the blocks: embedding, final RMSNorm, and the head unless tied."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        return self.root + self.layers * self.block

    @property
    def matmul_parameters(self) -> int:
        """Elements that autocast casts: the matrices of linear layers, the head included."""
        return self.layers * self.block_matrices + self.vocab * self.hidden


def gpt_shape(model: ModelSpec) -> GptShape | None:
    """Return the shape of the built-in GPT, or None for the user's own model."""
    if model.factory is not None:
        return None
    return GptShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads or model.heads,
        ffn=model.ffn or 4 * model.hidden,
        vocab=model.vocab,
        tied=model.tied_embeddings,
    )


def shape_from_fields(fields: Mapping[str, ConfigValue]) -> GptShape | None:
    """Return the shape that an effective config describes, or None when it does not."""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied_embeddings")
    values: dict[str, Any] = {}
    factory = fields.get("model.factory")
    if factory is not None and factory.value is not None:
        return None
    for name in names:
        field = fields.get(f"model.{name}")
        if field is None or field.value is None:
            return None
        values["tied" if name == "tied_embeddings" else name] = field.value
    return GptShape(**values)


def unit_parameters(shape: GptShape, unit: Any, blocks_per_unit: int = 1) -> tuple[int, ...]:
    """Return the elements of each wrap unit, the root's own first; empty when not known.

    ``unit`` is ``block``, ``whole`` (one unit) or a list of class names, of which only the built-in
    GPT's ``Block`` is known here.
    """
    if unit == "whole":
        return (shape.parameters,)
    if unit not in ("block", ["Block"]):
        return ()
    whole, rest = divmod(shape.layers, blocks_per_unit)
    units = [blocks_per_unit * shape.block] * whole
    return (shape.root, *units, *([rest * shape.block] if rest else []))


def model_sizes_from_shape(spec: ProfileSpec) -> ModelSizes | None:
    """Return the built-in GPT's sizes, or None for the user's own model.

    Bytes are in the dtype of ``config.precision.parameters``. DDP has no wrap units: the whole
    model is one.
    """
    if spec.config.strategy == "megatron":
        return _megatron_sizes(spec)
    shape = gpt_shape(spec.workload.model)
    if shape is None:
        return None
    config = spec.config
    wrap: str | list[str] = "none"
    per_unit = 1
    if config.strategy == "fsdp1":
        wrap = config.fsdp1.wrap
    elif config.strategy == "fsdp2":
        wrap, per_unit = config.fsdp2.wrap, config.fsdp2.blocks_per_unit
    return ModelSizes(
        parameters=shape.parameters,
        parameter_bytes=shape.parameters * DTYPE_BYTES[config.precision.parameters],
        buffers_bytes=_rotary_bytes(shape, spec.workload.sequence_length),
        unit_parameters=unit_parameters(shape, "whole" if wrap == "none" else wrap, per_unit),
    )


def _megatron_sizes(spec: ProfileSpec) -> ModelSizes | None:
    """Megatron's own GPT: its shape follows from the effective config."""
    from fsdp_doctor.config.megatron_native import resolve_megatron
    from fsdp_doctor.config.megatron_sizes import model_sizes_from_megatron

    return model_sizes_from_megatron(resolve_megatron(spec, {}))


def _rotary_bytes(shape: GptShape, sequence_length: int) -> int:
    """Bytes of the rotary tables: float32 sine and cosine, half a head wide each."""
    return 2 * sequence_length * (shape.hidden // shape.heads // 2) * 4
