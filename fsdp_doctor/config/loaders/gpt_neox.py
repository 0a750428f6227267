"""gpt-neox's YAML: DeepSpeed's JSON and Megatron's arguments in one, hyphens or underscores."""

from __future__ import annotations

from dataclasses import replace

from fsdp_doctor.config.loaders.base import Source
from fsdp_doctor.config.loaders.structure import fields_of, mapping_of, structure_of, word_set
from fsdp_doctor.model.config import NativeConfig

FORMAT = "gpt_neox"
_SIGNS = word_set(
    """pipe_parallel_size model_parallel_size num_layers hidden_size num_attention_heads
    train_iters pos_emb data_impl checkpoint_factor split"""
)


def detect(source: Source) -> int:
    """Megatron's model keys beside DeepSpeed's at the top."""
    data = {key.replace("-", "_") for key in mapping_of(source)}
    found = len(_SIGNS & data)
    deepspeed = {"zero_optimization", "train_micro_batch_size_per_gpu", "fp16"} & data
    if not ({"pipe_parallel_size", "train_iters"} & data):
        return 0
    return 97 if found >= 4 and deepspeed else 60 if found >= 4 else 0


def load(source: Source) -> NativeConfig:
    """Return the keys with underscores, ``True`` being true."""
    structure = structure_of(source)
    fields = {}
    for key, field in fields_of(structure, source).items():
        first, dot, rest = key.partition(".")
        value = {"True": True, "False": False}.get(str(field.value), field.value)
        fields[f"{first.replace('-', '_')}{dot}{rest}"] = replace(field, value=value)
    return NativeConfig(
        format=FORMAT,
        framework="gpt-neox",
        fields=fields,
        unresolved=structure.notes,
        nested=structure.data,
    )
