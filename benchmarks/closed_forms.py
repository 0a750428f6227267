"""Closed-form estimates of a training step's peak, as people compute them today."""

from __future__ import annotations

from fsdp_doctor.model.spec import ProfileSpec


def closed_form_bytes(spec: ProfileSpec, parameters: int) -> int | None:
    """Model states, activations and logits added up; None where no formula is for such a job.

    Model states: DDP 18 bytes a parameter; FSDP 18 bytes over the ranks and 4 of the largest layer,
    as DeepSpeed's ``estimate_zero3_model_states_mem_needs`` has it for the nearest ZeRO stage;
    Megatron 18 bytes, or 6 and 12 over the ranks with its distributed optimizer, as Megatron-LM's
    ``theoretical_memory_usage.py`` has it, which knows none of its FSDPs. Activations of a layer
    as there: ``s b h (18 + 4 f/h)`` bytes, 2 s b h where it is recomputed; logits and embedding
    ``4 s b h (1 + v/h)``.
    """
    states = _model_states(spec, parameters)
    if states is None:
        return None
    model, workload = spec.workload.model, spec.workload
    tokens = workload.micro_batch * workload.sequence_length
    ffn = model.ffn or 4 * model.hidden
    layer = tokens * (18 * model.hidden + 4 * ffn)
    if _recomputed(spec):
        layer = 2 * tokens * model.hidden
    head = 4 * tokens * (model.hidden + model.vocab)
    return states + layer * model.layers + head


def _model_states(spec: ProfileSpec, parameters: int) -> int | None:
    config, model = spec.config, spec.workload.model
    if config.strategy == "ddp":
        return 18 * parameters
    if config.strategy in ("fsdp1", "fsdp2"):
        layer = 4 * model.hidden**2 + 3 * model.hidden * (model.ffn or 4 * model.hidden)
        return 4 * layer + 18 * parameters // spec.world_size
    megatron = config.megatron
    if config.strategy != "megatron" or (
        megatron.dist.use_megatron_fsdp
        or megatron.dist.use_torch_fsdp2
        or megatron.ddp.use_megatron_fsdp
    ):
        return None
    if megatron.ddp.use_distributed_optimizer:
        return 6 * parameters + 12 * parameters // spec.world_size
    return 18 * parameters


def _recomputed(spec: ProfileSpec) -> bool:
    if spec.config.strategy == "megatron":
        return spec.config.megatron.model.recompute_granularity == "full"
    return spec.config.activation_checkpointing.mode == "full"
