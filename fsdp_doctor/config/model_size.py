"""Sizes of a model that a config does not describe, as the user gives them."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_doctor.config.resolvers.words import as_int
from fsdp_doctor.errors import InputError
from fsdp_doctor.model.config import ConfigValue
from fsdp_doctor.model.run import ModelSizes

_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def parse_count(text: str) -> int:
    """Return a number of parameters: ``8000000000``, ``8e9``, ``8B``, ``1.3b``.

    Raises InputError when it is none.
    """
    folded = text.strip().lower()
    factor = _UNITS.get(folded[-1:], 1)
    try:
        count = float(folded[:-1] if factor > 1 else folded) * factor
    except ValueError:
        count = 0.0
    if not 1 <= count < 1e18:
        raise InputError("not a number of parameters", where=f"option --params {text}")
    return round(count)


def model_sizes(
    params: int | None,
    layers: int | None,
    hidden: int | None,
    fields: Mapping[str, ConfigValue],
) -> ModelSizes | None:
    """Return sizes from what is given and what the config tells; None when that is too little.

    A layer has 12 x hidden squared elements unless parameters and layers say otherwise; without
    parameters the rest (embedding, head) is not counted.
    """
    layers = layers or _field(fields, "model.layers")
    hidden = hidden or _field(fields, "model.hidden")
    layer = None if hidden is None else 12 * hidden * hidden
    if params is None:
        if layers is None or layer is None:
            return None
        params = layers * layer
    units: tuple[int, ...] = ()
    if layers:
        each = min(layer if layer is not None else params // layers, params // layers)
        units = (params - layers * each, *([each] * layers))
    return ModelSizes(parameters=params, parameter_bytes=4 * params, unit_parameters=units)


def _field(fields: Mapping[str, ConfigValue], key: str) -> int | None:
    value = fields.get(key)
    return None if value is None else as_int(value.value)
