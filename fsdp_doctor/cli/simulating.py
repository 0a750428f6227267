"""The option that lets ``compare`` simulate the specs between A and B."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fsdp_doctor.cli.launching import progress_line
from fsdp_doctor.errors import MissingDependencyError

if TYPE_CHECKING:
    from fsdp_doctor.attribution.what_if import Simulation

F = TypeVar("F", bound=Callable[..., Any])


def simulate_option(function: F) -> F:
    """Add ``--simulate/--no-simulate``."""
    return click.option(
        "--simulate/--no-simulate",
        "simulate",
        default=None,
        help="Simulate the specs between A and B to divide memory among the changed fields, some "
        "seconds of CPU each. Default: when two or more changed and one may have moved it.",
    )(function)


@contextmanager
def simulation(wanted: bool | None) -> Iterator[Simulation | None]:
    """Yield what simulates, or None when it is not ``wanted``; None (automatic) needs torch.

    Raises MissingDependencyError when it is asked for and torch is not installed.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    if wanted and not has_torch:
        raise MissingDependencyError("torch", "simulate the specs between A and B", "profile")
    if wanted is False or not has_torch:
        yield None
        return
    from fsdp_doctor.attribution.what_if import Simulation
    from fsdp_doctor.simulator.many import Simulations

    with Simulations() as simulations, progress_line() as tell:
        yield Simulation(simulate=simulations.ask, always=bool(wanted), tell=tell)
