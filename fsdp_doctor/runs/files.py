"""The files of a run directory, line by line. Their content is not trusted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fsdp_doctor.errors import InputError
from fsdp_doctor.model.run import RunManifest
from fsdp_doctor.runs.writer import SCHEMA, rank_file_name


def load_manifest(path: Path) -> RunManifest:
    """Read run.json; InputError when it is missing, broken or of a newer schema."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
        schema = raw.get("schema") if isinstance(raw, dict) else None
        if not isinstance(schema, int) or schema > SCHEMA:
            raise InputError(
                f"schema {schema!r} is not known to this version (newest: {SCHEMA})",
                where=str(path),
                hint="upgrade fsdp-doctor",
            )
        return msgspec.convert(raw, RunManifest)
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"not a valid run manifest: {error}", where=str(path)) from None


def records_of(path: Path, warnings: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, record) of a rank's file; lines that are none become warnings."""
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            record = whole_record(line, f"{path.name}:{number}", warnings)
            if record is not None:
                yield number, record


_DECODER = msgspec.json.Decoder()


def whole_record(line: bytes, where: str, warnings: list[str]) -> dict[str, Any] | None:
    """Return the record of a line, or None and a warning when it is none."""
    try:
        record = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        torn = "torn by a crash" if not line.endswith(b"\n") else "not JSON"
        warnings.append(f"{where}: line skipped ({torn})")
        return None
    if isinstance(record, dict) and isinstance(record.get("record"), str):
        return record
    warnings.append(f"{where}: line skipped (not a record)")
    return None


def read_records(directory: Path, rank: int) -> list[dict[str, Any]]:
    """Return a rank's raw records, whole lines only; none when the file is missing."""
    path = directory / rank_file_name(rank)
    return [record for _, record in records_of(path, [])] if path.is_file() else []
