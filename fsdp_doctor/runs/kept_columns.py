"""The columns of a long rank file, kept beside it, so that no line of it is parsed again.

The lines stay the record: the columns are derived from them when a rank ends, hold a checksum of
the bytes that they cover, and are left aside, with the file read line by line, when they do not
match or are not there (a killed rank has none). Lines that follow later are read as lines.

A file is one line of JSON (``_Head``), then the arrays of ``_ARRAYS`` one after the other, as the
machine has them (little endian).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from fsdp_doctor.model.run import StepRecord
from fsdp_doctor.runs.columns import KINDS, StepColumns
from fsdp_doctor.runs.fast_reader import FastRank, read_columns

MOST_BYTES = 1 << 26
"""Columns of larger files are not kept: making them takes several times their memory."""
_SCHEMA = 1
_ARRAYS = {
    "numbers": ("<i8", 1),
    "kinds": ("i1", 1),
    "step_time_s": ("<f8", 1),
    "retries": ("<i8", 1),
    "device_used": ("<i8", 1),
    "present": ("?", 2),
    "peak_allocated": ("<i8", 2),
    "peak_reserved": ("<i8", 2),
    "end_allocated": ("<i8", 1),
    "end_reserved": ("<i8", 1),
    "time_s": ("<f8", 2),
}
"""Field of StepColumns -> type, and 1 (steps) or 2 (phases x steps) dimensions."""


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    covers: _Count
    """Bytes of the rank file, from its start, that the columns hold."""
    checksum: int
    """CRC-32 of those bytes, and then of the arrays."""
    lines: _Count
    """Lines in those bytes."""
    others: list[tuple[_Count, _Count, _Count]]
    """Line number, first byte and end of the records that are not about steps."""
    phases: tuple[str, ...]
    steps: _Count


def columns_path(path: Path) -> Path:
    """Return where the columns of a rank file are kept."""
    return path.with_suffix(".columns")


def keep_columns(path: Path) -> None:
    """Keep the columns of a rank file that is complete; nothing where something in it is unusual.

    Never raises for want of space, rights or memory: the columns only save time.
    """
    temporary = path.with_suffix(f".columns.{os.getpid()}")
    try:
        found = read_columns(path, tuple) if path.stat().st_size <= MOST_BYTES else None
        if found is not None:
            temporary.write_bytes(_encoded(path.read_bytes(), found))
            temporary.replace(columns_path(path))
    except (OSError, MemoryError):
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _encoded(data: bytes, found: FastRank) -> bytes:
    columns = found.columns
    arrays = b"".join(
        np.ascontiguousarray(getattr(columns, name), dtype=kind).tobytes()
        for name, (kind, _) in _ARRAYS.items()
    )
    others, at = [], 0
    for number, line in found.others:
        at = data.index(line, at)
        others.append((number, at, at + len(line)))
    head = _Head(
        schema=_SCHEMA,
        covers=len(data),
        checksum=zlib.crc32(arrays, zlib.crc32(data)),
        lines=data.count(b"\n"),
        others=others,
        phases=columns.phases,
        steps=len(columns),
    )
    return msgspec.json.encode(head) + b"\n" + arrays


def kept_columns(path: Path, load: Callable[[], tuple[StepRecord, ...]]) -> FastRank | None:
    """Return what was kept of a rank file; None where nothing was, or where it does not match.

    ``load`` builds the records from the lines.
    """
    try:
        first, _, rest = columns_path(path).read_bytes().partition(b"\n")
        head = msgspec.json.decode(first, type=_Head)
        data = path.read_bytes()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    covered = memoryview(data)[: head.covers]
    if head.schema != _SCHEMA or len(covered) < head.covers:
        return None
    if zlib.crc32(rest, zlib.crc32(covered)) != head.checksum:
        return None
    arrays = _arrays(head, rest)
    if arrays is None:
        return None
    others = [(number, data[start:end]) for number, start, end in head.others]
    later = data[head.covers :].splitlines(keepends=True)
    others += [(head.lines + place, line) for place, line in enumerate(later, 1) if line.strip()]
    columns = StepColumns(phases=head.phases, load=load, **arrays)
    return FastRank(columns=columns, others=others)


def _arrays(head: _Head, rest: bytes) -> dict[str, Any] | None:
    """Return the arrays, or None when they are not what the head says."""
    shapes = {1: (head.steps,), 2: (len(head.phases), head.steps)}
    found: dict[str, Any] = {}
    at = 0
    try:
        for name, (kind, dimensions) in _ARRAYS.items():
            shape = shapes[dimensions]
            array = np.frombuffer(rest, kind, int(np.prod(shape)), at).reshape(shape)
            at += array.nbytes
            found[name] = array
    except ValueError:
        return None
    numbers, kinds = found["numbers"], found["kinds"]
    fine = (
        at == len(rest)
        and (np.diff(numbers, prepend=-1) > 0).all()
        and ((kinds >= 0) & (kinds < len(KINDS))).all()
    )
    return found if fine else None
