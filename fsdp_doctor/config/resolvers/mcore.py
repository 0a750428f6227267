"""From Megatron-Core settings to canonical fields, for every framework that trains through it."""

from __future__ import annotations

from fsdp_doctor.config.resolvers.mcore_model import (
    batch_fields,
    model_fields,
    other_fields,
    parallel_fields,
)
from fsdp_doctor.config.resolvers.mcore_rules import apply_rules
from fsdp_doctor.config.resolvers.mcore_settings import Settings
from fsdp_doctor.config.resolvers.mcore_sharding import communication_fields, sharding_fields
from fsdp_doctor.config.resolvers.mcore_training import (
    offload_fields,
    optimizer_fields,
    precision_fields,
    recompute_fields,
)


def resolve_mcore(settings: Settings) -> None:
    """Apply Megatron's rules and set every canonical field."""
    apply_rules(settings)
    sharding_fields(settings)
    communication_fields(settings)
    parallel_fields(settings)
    batch_fields(settings)
    precision_fields(settings)
    recompute_fields(settings)
    offload_fields(settings)
    optimizer_fields(settings)
    model_fields(settings)
    other_fields(settings)
