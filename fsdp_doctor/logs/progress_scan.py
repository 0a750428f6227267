"""Take the progress lines out of a piece of a log and put them into the history."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_doctor.logs.history import History
from fsdp_doctor.logs.prefix import ANSI, rank_of_head
from fsdp_doctor.logs.progress import FAMILIES, Family
from fsdp_doctor.logs.progress.base import Column
from fsdp_doctor.logs.progress.generic import FAMILY as GENERIC
from fsdp_doctor.logs.progress.generic import MARKERS
from fsdp_doctor.logs.triggers import line_shapes

_HEADS_TRIED = 4
_HEAD = 12
"""Bytes that hold a rank prefix."""
_MAX_HEADS = 1 << 16
_VARIED, _RETRY = 2, 8
"""After so many pieces of different lines their shapes are asked for once in so many pieces."""


@dataclass(slots=True)
class Remainder:
    """A piece without its densest progress lines, and the way back to the places in it."""

    data: bytes
    piece: bytes
    pattern: re.Pattern[bytes] | None
    """What was cut out; None: nothing."""
    shapes: bytes | None = None
    """The different lines of ``data`` (``line_shapes``), where they are few."""
    starts: list[int] = field(default_factory=list)
    """Offsets in ``data`` at which kept stretches begin."""
    origins: list[int] = field(default_factory=list)
    """The same places in the whole piece."""

    def origin(self, offset: int) -> int:
        """Return the offset in the whole piece of the line that begins at ``offset``."""
        if self.pattern is None:
            return offset
        if not self.starts:
            self._find_places(self.pattern)
        index = bisect_right(self.starts, offset) - 1
        return self.origins[index] + offset - self.starts[index]

    def _find_places(self, pattern: re.Pattern[bytes]) -> None:
        position = length = 0
        for match in pattern.finditer(self.piece):
            self.starts.append(length)
            self.origins.append(position)
            length += match.start() - position
            position = match.end()
        self.starts.append(length)
        self.origins.append(position)


class ProgressScanner:
    """Reads the progress lines of one file.

    The family that had most lines in the piece before is cut out first, with one ``re.split`` that
    gives its columns and what remains; all other searches see only that.
    """

    def __init__(self, history: History, rank: int | None, dense: Family | None = None) -> None:
        self._history = history
        self._rank = rank
        self.dense = dense
        """Where the file before left off, for files of the same job."""
        self._searched = _companions(dense)
        self._heads: dict[bytes, int | None] = {}
        self._pieces = self._varied = 0

    def take(self, data: bytes) -> Remainder:
        """Add the lines of a piece to the history; return what else stands in it."""
        counts: dict[str, int] = {}
        dense = self.dense
        remainder = Remainder(data, data, None)
        if dense is not None and dense.marker in data:
            remainder, counts[dense.name] = self._split(dense, data)
        remainder.shapes = self._shapes(remainder.data)
        seen = remainder.data if remainder.shapes is None else remainder.shapes
        for family in self._searched if any(counts.values()) else FAMILIES:
            if family is not dense and family.marker in seen:
                counts[family.name] = self._search(family, remainder.data)
        if not any(counts.values()) and self._generic(remainder.data):
            counts[GENERIC.name] = self._search(GENERIC, remainder.data)
        best = max(counts, key=lambda name: counts[name], default=None)
        if best is not None and counts[best] > 0:
            chosen = next((family for family in FAMILIES if family.name == best), None)
            self.dense = None if chosen is None or chosen.by_marker else chosen
            self._searched = _companions(self.dense)
        return remainder

    def _shapes(self, data: bytes) -> bytes | None:
        """The shapes of the lines; where they were too different they are tried less often."""
        self._pieces += 1
        if self._varied >= _VARIED and self._pieces % _RETRY:
            return None
        shapes = line_shapes(data)
        self._varied = self._varied + 1 if shapes is None else 0
        return shapes

    @staticmethod
    def _generic(data: bytes) -> bool:
        """Whether lines of a step with memory may be there; a sample tells."""
        sample = data[:65536].lower()
        return (b"step" in sample or b"iter" in sample) and any(m in sample for m in MARKERS)

    def _split(self, family: Family, data: bytes) -> tuple[Remainder, int]:
        width = family.pattern.groups + 1
        parts = family.pattern.split(data)
        kept = parts[::width]
        columns = [parts[group::width] for group in range(1, width)]
        self._add(family, columns, [_last_line(text) for text in kept[:_HEADS_TRIED]], kept)
        return Remainder(b"".join(kept), data, family.pattern), len(columns[0])

    def _search(self, family: Family, data: bytes) -> int:
        found = list(family.matches(data))
        columns = list(zip(*(match.groups() for match in found), strict=True))
        before: list[bytes] = []
        if family.rank_group is None:
            before = [data[max(0, match.start() - 200) : match.start()] for match in found]
        self._add(family, columns, [_last_line(text) for text in before[:_HEADS_TRIED]], before)
        return len(found)

    def _add(
        self, family: Family, columns: Sequence[Column], heads: list[bytes], before: list[bytes]
    ) -> None:
        if not columns or not columns[0]:
            return
        self._history.count(family.name, len(columns[0]))
        if family.rank_group is not None:
            ranks: list[int | None] = [int(text[:8]) for text in columns[family.rank_group]]
        elif all(self._rank_of(head) is None for head in heads):
            ranks = [self._rank]
        else:
            own = self._rank
            found = [self._rank_of(_last_line(text)) for text in before[: len(columns[0])]]
            ranks = [own if rank is None else rank for rank in found]
        for rank, part in _by_rank(ranks, columns).items():
            family.read(self._history.of(rank), part, self._history)

    def _rank_of(self, head: bytes) -> int | None:
        """Return the rank that a line's prefix tells; equal beginnings are read once."""
        key = head[:_HEAD]
        if key not in self._heads:
            if len(self._heads) > _MAX_HEADS:
                self._heads.clear()
            text = head[:40].decode("ascii", "replace")
            self._heads[key] = rank_of_head(ANSI.sub("", text) if "\x1b" in text else text)
        return self._heads[key]


_FRAMEWORKS = ("megatron", "bridge", "torchtitan")


def _companions(dense: Family | None) -> tuple[Family, ...]:
    """Return the families to search beside the one that fills a log: those of frameworks.

    Bars of data preparation and the like do not tell training steps where a framework does.
    """
    if dense is None or not dense.name.startswith(_FRAMEWORKS):
        return FAMILIES
    return tuple(f for f in FAMILIES if f.name.startswith((*_FRAMEWORKS, "deepspeed")))


def _last_line(text: bytes) -> bytes:
    """Return the beginning of the line that ``text`` ends in."""
    return text[text.rfind(b"\n") + 1 :]


def _by_rank(
    ranks: Sequence[int | None], columns: Sequence[Column]
) -> dict[int | None, Sequence[Column]]:
    """Part the columns by rank; one rank: they are all its."""
    if len(set(ranks)) == 1:
        return {ranks[0]: columns}
    rows: dict[int | None, list[tuple[bytes, ...]]] = {}
    for rank, row in zip(ranks, zip(*columns, strict=True), strict=True):
        rows.setdefault(rank, []).append(row)
    return {rank: list(zip(*some, strict=True)) for rank, some in rows.items()}
