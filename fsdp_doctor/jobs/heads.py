"""The beginning of a log, where a job prints its arguments and versions."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from fsdp_doctor.errors import InputError
from fsdp_doctor.logs.reader import PIECE, opened, pieces

_MOST_PIECES = 8
"""Dumps stand within the first MiB of a log, or a few of them where 1,000 ranks print first."""


def head_of(path: Path) -> str:
    """Return up to the first 8 MiB of a plain or gzip log as text. Raises InputError."""
    try:
        with opened(path) as stream:
            data = b"".join(islice(pieces(stream), _MOST_PIECES))[: _MOST_PIECES * PIECE]
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path)) from None
    return data.decode("utf-8", "replace").replace("\r\n", "\n")
