"""Write a run directory so that a crash loses nothing already recorded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from fsdp_doctor.model.run import RunManifest

SCHEMA = 1
MANIFEST_NAME = "run.json"
LONG_BYTES = 1 << 18
"""Rank files from here on are read into columns, which their writer keeps beside them."""


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's record file."""
    return f"rank-{rank:05d}.jsonl"


def write_manifest(directory: Path, manifest: RunManifest) -> None:
    """Write ``run.json`` atomically (write beside it, then rename)."""
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    temporary = directory / f".{MANIFEST_NAME}.{os.getpid()}"
    temporary.write_bytes(encoded + b"\n")
    temporary.replace(directory / MANIFEST_NAME)


class RankWriter:
    """Append records to one rank's file; each record is one ``write`` call of a whole line.

    A process killed at any moment leaves whole lines behind, and at most one torn last line that
    the reader skips.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.path = directory / rank_file_name(rank)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._encoder = msgspec.json.Encoder()
        self._written = 0

    def write(self, record: str, fields: dict[str, Any]) -> None:
        """Append ``{"record": record, **fields}``.

        Raises OSError when the disk is full or the file cannot be written.
        """
        line = self._encoder.encode({"record": record, **fields}) + b"\n"
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes written (disk full?)")
        self._written += written

    def close(self) -> None:
        """Close the file; further writes are errors. Of a long file columns are kept beside it."""
        os.close(self._descriptor)
        if self._written >= LONG_BYTES:
            from fsdp_doctor.runs.kept_columns import keep_columns

            keep_columns(self.path)
