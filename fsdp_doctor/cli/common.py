"""What several commands share: options and the JSON envelope."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fsdp_doctor import __version__

JSON_SCHEMA = 1

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def emit_json(command: str, payload: dict[str, Any], warnings: Sequence[str] = ()) -> None:
    """Print the JSON envelope of a command: schema, command, tool, warnings, then ``payload``.

    Dataclasses in ``payload`` are written as objects; bytes stay integers, unknown values null.
    """
    import msgspec

    envelope = {
        "schema": JSON_SCHEMA,
        "command": command,
        "tool": {"name": "fsdp-doctor", "version": __version__},
        "warnings": list(warnings),
        **payload,
    }
    click.echo(msgspec.json.format(msgspec.json.encode(envelope), indent=1).decode())


def refuse_overwrite(path: Path, *, force: bool) -> None:
    """Raise when ``path`` exists and may not be replaced."""
    from fsdp_doctor.errors import InputError

    if path.exists() and not force:
        raise InputError("already exists", where=str(path), hint="use --force to replace it")
