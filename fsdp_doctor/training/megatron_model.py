"""Megatron-Core's own GPT with its local layers, in the workload's shape."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.megatron_spec import MegatronModel
from fsdp_doctor.model.spec import ModelSpec, ProfileSpec
from fsdp_doctor.training.megatron_setup import fill, section_values

_LOCAL = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""Everything that would need Transformer Engine or Apex is off; no dropout, so that runs agree."""


def transformer_config(spec: ProfileSpec) -> Any:
    """Return the ``TransformerConfig`` of a spec. Raises InputError when Megatron refuses it."""
    from megatron.core.transformer import TransformerConfig

    shape, model = spec.workload.model, spec.config.megatron.model
    dtype = torch.bfloat16 if model.bf16 else torch.float32
    asked = section_values(model)
    made: dict[str, Any] = {
        **_LOCAL,
        **_shape(shape),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": False,
    }
    try:
        return fill(TransformerConfig, "model", asked, made)
    except (ValueError, AssertionError) as error:
        raise InputError(str(error), where="config.megatron.model") from None


def _shape(shape: ModelSpec) -> dict[str, Any]:
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads or shape.heads,
        "ffn_hidden_size": shape.ffn or 4 * shape.hidden,
    }


def build_gpt(spec: ProfileSpec, config: Any, device: torch.device) -> nn.Module:
    """Return Megatron's GPT in its precision, on the device (meta where the spec says so)."""
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import (
        set_defaults_if_not_set_tensor_model_parallel_attributes,
    )
    from megatron.core.transformer.module import Float16Module

    model_section: MegatronModel = spec.config.megatron.model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Apex and Transformer Engine are absent on purpose
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                normalization=model_section.normalization
            ),
            vocab_size=spec.workload.model.vocab,
            max_sequence_length=spec.workload.sequence_length,
            share_embeddings_and_output_weights=spec.workload.model.tied_embeddings,
            position_embedding_type="rope",
        )
    model.model_type = ModelType.encoder_or_decoder
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if not model_section.init_model_with_meta_device:
        model.to(device)  # Megatron builds some weights on the host
    built: nn.Module = Float16Module(config, model) if model_section.bf16 else model
    return built


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """Return Megatron's transformer layers: its sharding units."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    return [module for module in model.modules() if isinstance(module, TransformerLayer)]


class TokenBatches:
    """Random tokens as Megatron's GPT takes them; different on every rank."""

    def __init__(self, spec: ProfileSpec, device: torch.device, rank: int) -> None:
        workload = spec.workload
        self._vocab, self._device = workload.model.vocab, device
        self._shape = (workload.micro_batch, workload.sequence_length + 1)
        self._generator = torch.Generator(device).manual_seed(workload.seed * 100_003 + rank)
        length = workload.sequence_length
        self._positions = torch.arange(length, device=device).repeat(workload.micro_batch, 1)
        ones = torch.ones(1, 1, length, length, device=device, dtype=torch.bool)
        self._mask = ones.triu(1)

    def __call__(self) -> dict[str, torch.Tensor]:
        """Return one micro batch."""
        tokens = torch.randint(
            0, self._vocab, self._shape, device=self._device, generator=self._generator
        )
        return {
            "input_ids": tokens[:, :-1].contiguous(),
            "position_ids": self._positions,
            "attention_mask": self._mask,
            "labels": tokens[:, 1:].contiguous(),
        }
