"""The command line. One file per command, loaded only when that command runs."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from fsdp_doctor import __version__
from fsdp_doctor.cli.collection import collect_as_usual, collect_rarely
from fsdp_doctor.errors import DoctorError

COMMANDS = {
    "oom": "Say from a dead job's logs what failed first, where, why, and what to change.",
    "profile": "Run short real training steps and record memory and time of every rank.",
    "compare": "Compare two runs or two specs: what got worse, by how much, which flag did it.",
    "bisect": "Find by re-runs which of the fields that differ between two specs did it.",
    "diff": "Show what really changed between two configs and what each change means.",
    "check": "Check a config against the rules of its framework and version.",
    "verify": "Train a few steps on real ranks and say whether a config trains right.",
    "show": "Show the effective config: every value, where it comes from, what does nothing.",
    "estimate": "Estimate a rank's memory at any world size, without a GPU.",
    "fit": "Search the changes that make a spec fit into a GPU, and what they cost.",
    "log": "List runs over time: where a metric changed for good, and which fields did there.",
    "report": "Render recorded runs: terminal, HTML, Markdown, JSON, CSV.",
    "demo": "Profile two packaged specs and compare them (the quick start).",
}
"""Command name -> one-line help, so that ``--help`` loads no command."""


class _ReaderLeftError(Exception):
    """Standard output was closed; click would end with status 1 at a BrokenPipeError."""


class LazyGroup(click.Group):
    """A group whose commands live in modules of the same name."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the arguments, or print the help."""
        try:
            return super().make_context(*args, **extra)
        except BrokenPipeError as error:
            raise _ReaderLeftError from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderLeftError from error

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        """Return the command names in the order a user meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return a command, or None when there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"fsdp_doctor.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fsdp-doctor")
def group() -> None:
    """Why a distributed training job ran out of memory or got slower."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    0: answered, whatever was found. 1: a failed ``profile``, a gate that fired. 2: unusable input.
    """
    collect_rarely()
    try:
        result = group.main(
            args=None if argv is None else list(argv),
            prog_name="fsdp-doctor",
            standalone_mode=False,
        )
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.Abort:
        click.echo("interrupted", err=True)
        return 1
    except click.ClickException as error:
        error.show()
        return 2
    except DoctorError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except (_ReaderLeftError, BrokenPipeError):
        return _reader_left()
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {place}{error.strerror or error}", err=True)
        return 2
    finally:
        collect_as_usual()
    return result if isinstance(result, int) else 0


def _reader_left() -> int:
    """Answer a reader that has seen enough (``| head``); what is still buffered goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
