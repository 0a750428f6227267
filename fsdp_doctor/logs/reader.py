"""Read a log in pieces of whole lines, whatever its size, encoding or compression.

Memory is bounded: a piece is about 1 MiB, and of a longer line only its beginning is kept. Torn
gzip files give what could be read. UTF-16 is turned into UTF-8.
"""

from __future__ import annotations

import codecs
import gzip
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

PIECE = 1 << 20
MAX_LINE = 1 << 16
"""Longer lines lose their rest; no message of the known ones is longer."""

_GZIP = b"\x1f\x8b"
_BOMS = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


@contextmanager
def opened(path: Path | None) -> Iterator[IO[bytes]]:
    """Open a plain or gzip file, or standard input for None."""
    if path is None:
        stream = cast("IO[bytes]", io.BufferedReader(cast("io.RawIOBase", _Pipe(sys.stdin.buffer))))
        yield _unpacked(stream)
        return
    with path.open("rb") as file:
        yield _unpacked(cast("IO[bytes]", file))


class _Pipe(io.RawIOBase):
    """Standard input as raw bytes that closing leaves open."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _unpacked(stream: IO[bytes]) -> IO[bytes]:
    head = stream.peek(2)[:2] if hasattr(stream, "peek") else b""
    return cast("IO[bytes]", gzip.GzipFile(fileobj=stream)) if head == _GZIP else stream


def pieces(stream: IO[bytes], size: int = PIECE) -> Iterator[bytes]:
    """Yield the stream in pieces that end with a line (the last may not)."""
    rest = b""
    cut = False
    for block in _blocks(stream, size):
        data = block
        if cut:  # inside a line whose beginning was given out already
            end = data.find(b"\n")
            if end < 0:
                continue
            data, cut = data[end + 1 :], False
        end = data.rfind(b"\n")
        if end < 0:
            rest += data
            if len(rest) > MAX_LINE:
                yield rest[:MAX_LINE] + b"\n"
                rest, cut = b"", True
            continue
        yield rest + data[: end + 1]
        rest = data[end + 1 :]
        if len(rest) > MAX_LINE:
            yield rest[:MAX_LINE] + b"\n"
            rest, cut = b"", True
    if rest:
        yield rest


def _blocks(stream: IO[bytes], size: int) -> Iterator[bytes]:
    decoder: codecs.IncrementalDecoder | None = None
    first = True
    while True:
        try:
            block = stream.read(size)
        except (EOFError, OSError, zlib.error):  # a torn or damaged archive
            return
        if not block:
            return
        if first:
            decoder = _decoder(block)
            first = False
        yield decoder.decode(block).encode("utf-8", "replace") if decoder else block


def _decoder(head: bytes) -> codecs.IncrementalDecoder | None:
    for mark, name in _BOMS:
        if head.startswith(mark):
            return codecs.getincrementaldecoder(name)("replace")
    sample = head[:512]
    if len(sample) >= 16 and sample[1::2].count(0) > len(sample) // 3 and b"\n" in sample:
        return codecs.getincrementaldecoder("utf-16-le")("replace")
    return None


def text_of(line: bytes) -> str:
    """Return a line as text; bytes that are no UTF-8 become replacement characters."""
    return line[:MAX_LINE].decode("utf-8", "replace")
