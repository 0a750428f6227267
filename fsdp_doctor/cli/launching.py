"""Options and progress shared by the commands that start training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from fsdp_doctor.profiler.launch import LaunchOptions

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--device",
        type=click.Choice(["auto", "cuda", "cpu"]),
        default="auto",
        help="auto: CUDA when every rank has a GPU of its own, else CPU with gloo.",
    ),
    click.option(
        "--one-rank-of",
        type=click.IntRange(min=1),
        metavar="N",
        help="Play one rank of N in one process: real memory, no communication.",
    ),
    click.option(
        "--rank",
        type=click.IntRange(min=0),
        default=0,
        help="Which rank --one-rank-of plays.",
    ),
    click.option(
        "--phase-timeout",
        "phase_limit_s",
        type=click.FloatRange(min=0, min_open=True),
        default=300.0,
        metavar="SECONDS",
        help="A rank that stays in one phase longer than this hangs (default 300).",
    ),
    click.option(
        "--memory-fraction",
        type=click.FloatRange(0, 1, min_open=True),
        help="Limit the CUDA allocator to this fraction of the GPU.",
    ),
    click.option("--force", is_flag=True, help="Replace an existing run."),
)


def launch_options(function: F) -> F:
    """Add the options that decide how specs are executed."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def make_launch_options(values: dict[str, Any], **more: Any) -> LaunchOptions:
    """Build LaunchOptions from a command's parameters."""
    return LaunchOptions(**values, **more)


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what the ranks are doing, on standard error.

    On a terminal one line is rewritten; elsewhere only every change of launch is printed.
    """
    if not sys.stderr.isatty():
        shown: set[str] = set()

        def tell(text: str) -> None:
            launch = text.partition(":")[0]
            if launch not in shown:
                shown.add(launch)
                click.echo(launch, err=True)

        yield tell
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(text.replace("[", r"\["))
