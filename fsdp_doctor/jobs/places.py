"""Where in a job's logs its iteration and memory lines stand, for a reader who wants to check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fsdp_doctor.logs.progress import FAMILIES, Family
from fsdp_doctor.logs.reader import opened, pieces

MOST_FILES = 8
"""Of a directory of many ranks the first files stand for the others."""


def places_of(paths: Sequence[Path], found: Mapping[str, int]) -> tuple[str, ...]:
    """Return e.g. ``job.log:853-989 megatron iteration``, a text a file and kind of line.

    ``found``: the kinds that were read, as ``History.formats`` has them.
    """
    families = [family for family in FAMILIES if family.name in found]
    return tuple(text for path in paths[:MOST_FILES] for text in _in_file(path, families))


def _in_file(path: Path, families: Sequence[Family]) -> Iterator[str]:
    first: dict[str, int] = {}
    last: dict[str, tuple[int, bytes]] = {}
    lines = 0
    with opened(path) as stream:
        for piece in pieces(stream):
            for family in families:
                if family.marker not in piece:
                    continue
                last[family.name] = (lines, piece)
                if family.name not in first and (found := next(family.matches(piece), None)):
                    first[family.name] = lines + _line(piece, found.start())
            lines += piece.count(b"\n")
    for family in families:
        if family.name not in first:
            continue
        base, piece = last[family.name]
        ends = [match.start() for match in family.matches(piece)]
        end = base + _line(piece, ends[-1]) if ends else first[family.name]
        yield f"{path.name}:{first[family.name]}-{end} {family.name}"


def _line(piece: bytes, offset: int) -> int:
    """Return the number of the line at an offset, from 1."""
    return piece.count(b"\n", 0, offset) + 1
