"""Unpickle plain containers, and nothing else. Standard library only."""

from __future__ import annotations

import gzip
import io
import pickle
from typing import Any, BinaryIO

GZIP = b"\x1f\x8b"


class RefusedError(Exception):
    """The file is no snapshot, or not one that may be read."""


class PlainUnpickler(pickle.Unpickler):
    """Builds dict, list, tuple, str, bytes, int, float, bool and None; names nothing."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse: a snapshot holds no classes and no functions."""
        raise RefusedError(
            f"it names {module[:60]}.{name[:60]}; a memory snapshot holds plain data"
        )

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002
        """Refuse: a snapshot holds no references to the outside."""
        raise RefusedError("it holds a persistent id; a memory snapshot holds plain data")


def load(file: BinaryIO) -> tuple[Any, int]:
    """The object and the bytes it took, decompressed."""
    head = file.read(4)
    file.seek(0)
    if not head:
        raise RefusedError("it is empty")
    if head[:2] == b"PK":
        raise RefusedError("it is a zip archive (torch.save), not a memory snapshot")
    stream: Any = gzip.GzipFile(fileobj=file) if head[:2] == GZIP else file
    if stream is not file:
        stream = io.BufferedReader(stream, 1 << 16)
    try:
        loaded = PlainUnpickler(stream).load()
    except EOFError:
        raise RefusedError("it ends before its end: cut off, or no pickle") from None
    return loaded, stream.tell()
