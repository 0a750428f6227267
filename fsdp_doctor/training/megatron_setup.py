"""Megatron-Core as installed: its version, its process groups, its config classes filled."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import warnings
from typing import Any

import torch

from fsdp_doctor.errors import InputError, MissingDependencyError
from fsdp_doctor.model.megatron_spec import MegatronDist
from fsdp_doctor.training.strategies.base import RankContext

_SEED = 1000
"""Added to the workload's seed for Megatron's model-parallel generators."""


def load_megatron(device: torch.device) -> str:
    """Make ``megatron.core`` importable on this device and return its version.

    Raises MissingDependencyError when it is not installed.
    """
    if device.type == "cpu":
        from fsdp_doctor.training import megatron_cpu

        megatron_cpu.install()
        # it warns that CPU and GPU generators are one, which here they are
        logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    # an old rule of Megatron's for tensor parallelism, which FSDP forbids; neither is used here
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|deprecated).*")
        try:
            core = importlib.import_module("megatron.core")
            importlib.import_module("megatron.core.optimizer")
        except ImportError as error:
            name = getattr(error, "name", None) or "megatron-core"
            package = "megatron-core" if name.startswith("megatron") else name
            raise MissingDependencyError(package, "profile Megatron jobs", "profile") from None
    return str(core.__version__)


def make_groups(context: RankContext, dist: MegatronDist, instances: int, seed: int) -> None:
    """Make Megatron's process groups (data parallel only) and seed its generators."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            1,
            1,
            num_distributed_optimizer_instances=instances,
            create_gloo_process_groups=uses_gloo(context, dist),
        )
    model_parallel_cuda_manual_seed(seed + _SEED)


def uses_gloo(context: RankContext, dist: MegatronDist) -> bool:
    """Whether there are CPU groups beside the devices' (a fake group has none)."""
    return dist.use_gloo_process_groups and not context.fake


def fill(cls: type[Any], section: str, asked: dict[str, Any], made: dict[str, Any]) -> Any:
    """Return ``cls`` with ``asked`` (the user's values) and ``made`` (ours).

    Raises InputError for a value of the user's that this version of the class has no field for,
    unless the value is the spec's default.
    """
    known = {field.name for field in dataclasses.fields(cls)}
    defaults = _spec_defaults(section)
    for name, value in asked.items():
        if name not in known and value != defaults.get(name):
            raise InputError(
                f"this version of Megatron-Core has no {cls.__name__}.{name}",
                where=f"config.megatron.{section}.{name}",
                hint="remove it or install a newer megatron-core",
            )
    values = {**asked, **made}
    return cls(**{name: value for name, value in values.items() if name in known})


def _spec_defaults(section: str) -> dict[str, Any]:
    from fsdp_doctor.model.megatron_spec import MegatronConfig

    defaults = getattr(MegatronConfig(), section)
    return {field.name: getattr(defaults, field.name) for field in dataclasses.fields(defaults)}


def section_values(section: Any, *without: str) -> dict[str, Any]:
    """Return a section's fields as a dict, without some."""
    names = [field.name for field in dataclasses.fields(section)]
    return {name: getattr(section, name) for name in names if name not in without}


def torch_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of that name; ``auto`` and None are None."""
    return None if name in (None, "auto") else getattr(torch, str(name))
