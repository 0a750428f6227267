"""What several commands share: options, the JSON envelope, and where a report goes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

Function = TypeVar("Function", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
_FORMATS = ("terminal", "html", "markdown", "json", "csv")
_ASCII = str.maketrans({"─": "-", "█": "#", "…": "~", "·": "-"} | dict.fromkeys("▏▎▍▌▋▊▉", "+"))


def report_options(function: Function) -> Function:
    """Add ``-o``, ``--format``, ``--json`` and ``--force`` to a command that writes a report.

    They arrive as ``output``, ``fmt``, ``as_json`` and ``force``; give them to ``deliver``.
    """
    options = (
        click.option(
            "-o",
            "--output",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write the report to this file; its extension chooses the format.",
        ),
        click.option("--format", "fmt", type=click.Choice(_FORMATS), help="Format of the report."),
        json_option,
        click.option("--force", is_flag=True, help="Replace the file if it exists."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def deliver(
    render: Callable[..., str],
    *,
    output: Path | None,
    fmt: str | None,
    as_json: bool,
    force: bool,
) -> None:
    """Print a report, or write it to ``output`` and say so.

    ``render`` is called as ``render(fmt)``, for printing to a terminal as
    ``render(fmt, color=..., width=...)``. Raises InputError when the file exists (without
    ``force``), its extension says no format, or it cannot be written.
    """
    from fsdp_doctor.report.base import format_of

    if as_json:
        fmt = "json"
    if output is None:
        chosen = fmt or "terminal"
        print_text(render(chosen, **terminal_style()) if chosen == "terminal" else render(chosen))
        return
    chosen = fmt or format_of(output)
    refuse_overwrite(output, force=force)
    write_text(output, render(chosen))
    click.echo(f"Wrote {output}", err=as_json)


def terminal_style() -> dict[str, Any]:
    """Return colour and width of the report: plain and 80 columns wide in pipes and files."""
    if not sys.stdout.isatty():
        return {"color": False, "width": 80}
    color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return {"color": color, "width": min(shutil.get_terminal_size((80, 24)).columns, 120)}


def print_text(text: str) -> None:
    """Print a rendered report, also to an output that cannot encode its line characters."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    click.echo(text, nl=not text.endswith("\n"))


def emit_json(command: str, payload: dict[str, Any], warnings: Sequence[str] = ()) -> None:
    """Print the JSON envelope of a command: schema, command, tool, warnings, then ``payload``.

    Dataclasses in ``payload`` are written as objects; bytes stay integers, unknown values null.
    """
    from fsdp_doctor.report.json_format import encode_envelope

    click.echo(encode_envelope(command, payload, warnings))


def refuse_overwrite(path: Path, *, force: bool) -> None:
    """Raise when ``path`` exists and may not be replaced."""
    from fsdp_doctor.errors import InputError

    if path.exists() and not force:
        raise InputError("already exists", where=str(path), hint="use --force to replace it")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all (beside it, then rename). Raises InputError."""
    from fsdp_doctor.errors import InputError

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(error.strerror or str(error), where=str(path)) from None
