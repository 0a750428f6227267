"""The events of a trace straight from the bytes of a pickle, thousands at a time.

Events that Python's pickler writes differ in few places, so their fields are read by comparing and
gathering bytes for all events of a window together: a position per event moves from field to field.
What is checked of every event: each opcode, each key, and that it ends exactly where the next one
begins. So if the first of a row of events stands where an opcode stands, all of them do. Whatever
looks different is not ``ok``, and left to others. Needs numpy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_doctor.memory.snapshot_walk import SHORT_BINUNICODE, Data, Layout, memo_numbers

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
Kinds = npt.NDArray[np.uint8]

WINDOW = 1 << 21
LEAST_RUN = 4
"""Shorter rows of events are not worth it."""
MAX_BODY = 1 << 16
PAIR = 1 << 62
"""Marks a pool that is written as two numbers: ``PAIR | first << 31 | second``."""
_BAD, _INT, _REF, _TEXT, _PLAIN = range(5)
_NUMBERS = {"addr": "addr", "size": "size", "time_us": "time", "stream": "stream"}
_BODY = re.compile(rb"\((?:h.|j.{4})+e|(?:h.|j.{4})a", re.DOTALL)


_THREE, _SEVEN, _ALL = np.uint64(3), np.uint64(7), np.uint64(64)


def _table(values: dict[int, int], rest: int = 0) -> npt.NDArray[np.uint8]:
    return np.array([values.get(op, rest) for op in range(256)], dtype=np.uint8)


_KINDS = _table({
    **dict.fromkeys(b"KMJ\x8a", _INT), **dict.fromkeys(b"hj", _REF),
    **dict.fromkeys(b"N\x88\x89", _PLAIN), 0x8C: _TEXT,
})  # fmt: skip
_WIDTHS = _table({**dict.fromkeys(b"Kh", 1), ord("M"): 2, **dict.fromkeys(b"Jj", 4)})
_COUNTED = _table(dict.fromkeys(b"\x8a\x8c", 1)) == 1  # the length follows: LONG1, texts
_SIGNED = _table(dict.fromkeys(b"J\x8a", 1)) == 1


class Bodies(dict[bytes, int]):
    """Numbers for what stands in lists of frames (references alone), from 1 on; 0: not that."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[bytes] = []
        self.size = 0
        self.references: list[list[int]] = [[]]
        self.largest = [-1]

    def __missing__(self, body: bytes) -> int:
        if len(body) > MAX_BODY or not _BODY.fullmatch(body):
            return 0
        numbers = memo_numbers([body[1:-1] if body[:1] == b"(" else body[:-1]])
        self.references.append(numbers)
        self.largest.append(max(numbers))
        self.known.append(body)
        self.size += len(body)
        self[body] = len(self.known)
        return self[body]


@dataclass(slots=True)
class Window:
    """Events of a piece of the file, in order."""

    columns: dict[str, npt.NDArray[Any]]
    """Per event ``start`` and ``end`` (positions); ``action`` (memo number), ``addr``, ``size``,
    ``time``, ``stream``, ``pool`` (memo number or pair), ``frames`` (number of a body, 0 for an
    empty list, or ``-1 - memo number``); ``memo`` (how many objects it memoizes)."""
    most: Ints
    """Largest memo number that each fetches outside of a body."""
    ok: Bools
    """Which of them are sure to be events if they stand where an opcode stands."""

    def runs(self) -> Iterator[tuple[int, int]]:
        """First and last index, exclusive, of rows of events that are all ``ok``."""
        starts, ends = self.columns["start"], self.columns["end"]
        joined = self.ok[1:] & self.ok[:-1] & (starts[1:] == ends[:-1])
        edges = np.flatnonzero(np.diff(joined, prepend=False, append=False))
        for first, last in edges.reshape(-1, 2).tolist():
            if last + 1 - first >= LEAST_RUN:
                yield first, last + 1


class EventParser:
    """Reads windows of one file."""

    def __init__(self, data: Data, layout: Layout) -> None:
        self.data, self.layout = data, layout
        self.bodies = Bodies()
        self._bytes = np.frombuffer(data, np.uint8)
        self._last = len(data) - 8
        self._words = np.frombuffer(data, "<u8", len(data) // 8)
        self._known: dict[int, Any] = {}
        self._prefix = int.from_bytes(layout.prefix, "little")
        self._prefix_mask = _mask(len(layout.prefix))

    def windows(self, begin: int) -> Iterator[Window]:
        """All windows from ``begin`` to the end of the file."""
        while begin < self._last:
            end = begin + WINDOW
            # the last one waits for the next window, so that all have another behind them
            starts = self._starts(begin, min(end, self._last - 8))
            if len(starts) > 1:
                yield self._window(starts[:-1], starts[1:])
            begin = int(starts[-1]) if len(starts) > 1 else end

    def _starts(self, begin: int, end: int) -> Ints:
        found = np.flatnonzero(self._bytes[begin : max(end, begin)] == self.layout.prefix[0])
        found += begin
        same = (self._word(found) & self._prefix_mask) == self._prefix
        return np.asarray(found[same])

    def _window(self, starts: Ints, following: Ints) -> Window:
        count = len(starts)
        columns: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(count, np.int64) for name in ("addr", "size", "time", "stream")
        }
        value, kind, at = self._value(starts + len(self.layout.prefix))
        ok = kind == _REF
        columns["action"], columns["pool"] = value, np.full(count, PAIR)
        most, memo = value, np.ones(count, np.int64)
        for name, key in self.layout.fields:
            ok &= self._stands(at, key)
            at = at + len(key)
            value, kind, behind = self._value(at)
            if name in _NUMBERS:
                ok &= kind == _INT
                columns[_NUMBERS[name]] = value
            elif name == "pool_id":
                pair, columns["pool"], behind = self._pair(value, kind, behind)
                ok &= pair | (kind == _REF)
                memo += pair
            else:
                ok &= kind != _BAD
                memo += kind == _TEXT
            most = np.maximum(most, np.where(kind == _REF, value, 0))
            at = behind
        ok &= columns["addr"] >= 0
        frames = np.zeros(count, np.int64)
        if self.layout.frames is not None:
            ok &= self._stands(at, self.layout.frames)
            at = at + len(self.layout.frames)
            frames, listed, at = self._frames(at, following, ok)
            most = np.maximum(most, -1 - frames)
            memo += listed
        ok &= self._stands(at, b"u") & (at < following)
        columns |= {"start": starts, "end": at + 1, "frames": frames, "memo": memo}
        return Window(columns, most, ok)

    def _value(self, at: Ints) -> tuple[Ints, Kinds, Ints]:
        """Value (of numbers and references), kind, and the position behind it."""
        word = self._word(at)
        first = int(word[0])
        size = _size(first)
        if size <= 8 and not ((word ^ word[0]) & _MASKS[size]).any():  # the same for all
            short = first & int(_MASKS[size])
            if short not in self._known:
                one = self._decode(at[:1], word[:1])
                self._known[short] = tuple(part[0] for part in one)
            value, kind, _ = self._known[short]
            return np.full(len(at), value), np.full(len(at), kind), at + size
        value, kind, sizes = self._decode(at, word)
        return value, kind, at + sizes

    def _decode(self, at: Ints, word: Words) -> tuple[Ints, Kinds, npt.NDArray[np.int32]]:
        """Value, kind and size; ``word`` is what stands at ``at``."""
        op = word.astype(np.uint8)
        kind, width, raw = _KINDS[op], _WIDTHS[op], word >> np.uint64(8)
        size = width + np.int32(1)
        counted = np.flatnonzero(_COUNTED[op])
        if len(counted):
            width[counted] = raw[counted]
            size[counted] = width[counted] + np.int32(2)
            raw[counted] = self._word(at[counted] + 2)
        unused = (np.uint64(64) - (width.astype(np.uint64) << 3)) & np.uint64(63)
        raw <<= unused
        signed = raw.view(np.int64) >> unused.view(np.int64)
        value = np.where(_SIGNED[op], signed, (raw >> unused).view(np.int64))
        kind[(kind == _INT) & ((width == 0) | (width > 8))] = _BAD
        text = np.flatnonzero(kind == _TEXT)
        if len(text):
            behind = at[text] + size[text]
            bad = self._bytes.take(behind, mode="clip") != ord(b"\x94")
            bad |= ~self._ascii(at[text] + 2, width[text].astype(np.int64))
            kind[text[bad]] = _BAD
            size[text] += 1
        return value, kind, size

    def _word(self, at: Ints) -> Words:
        """The eight bytes that begin at each position."""
        place, shift = at >> 3, (at.view(np.uint64) & _SEVEN) << _THREE
        word = self._words.take(place, mode="clip") >> shift
        # a shift by all 64 bits gives 0
        return np.asarray(word | self._words.take(place + 1, mode="clip") << (_ALL - shift))

    def _ascii(self, at: Ints, length: Ints) -> Bools:
        """Whether all of so many bytes are ASCII, which is UTF-8 that needs no decoding."""
        found = np.ones(len(at), np.bool_)
        for offset in range(0, int(length.max()), 8):
            rest = np.clip(length - offset, 0, 8)
            word = self._word(at + offset)
            found &= (word & _MASKS[rest] & np.uint64(0x8080808080808080)) == 0
        return found

    def _pair(self, first: Ints, kind: Kinds, at: Ints) -> tuple[Bools, Ints, Ints]:
        """Where two numbers make a tuple: that, the numbers as one, and the position behind."""
        second, other, behind = self._value(at)
        pair = (kind == _INT) & (other == _INT) & self._stands(behind, b"\x86\x94")
        pair &= ((first | second) >> 31) == 0
        pool = np.where(pair, PAIR | first << 31 | second, first)
        return pair, pool, np.where(pair, behind + 2, at)

    def _frames(self, at: Ints, following: Ints, ok: Bools) -> tuple[Ints, Bools, Ints]:
        """Frames, whether they are a list of their own, and where the event's last opcode is."""
        value, kind, behind = self._value(at)
        referred = kind == _REF
        listed = self._stands(at, b"]\x94")
        empty = listed & self._stands(at + 2, b"u")
        chosen = np.flatnonzero(listed & ~empty & ok)
        begins, ends = at[chosen] + 2, following[chosen] - 1
        data, bodies = self.data, self.bodies
        numbers = [
            bodies[data[begin:end]]
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)
        ]
        frames = np.where(referred, -1 - value, 0)
        frames[chosen] = numbers
        ok &= referred | empty | (frames > 0)
        return frames, listed, np.where(referred, behind, np.where(empty, at + 2, following - 1))

    def _stands(self, at: Ints, what: bytes) -> Bools:
        """Whether these bytes stand at the positions."""
        if len(what) == 1:
            return np.asarray(self._bytes.take(at, mode="clip") == what[0])
        word = self._word(at)
        word &= _mask(len(what))
        return np.asarray(word == int.from_bytes(what, "little"))


def _size(word: int) -> int:
    """How long an opcode is that begins so, if it is a value."""
    op, count = word & 255, word >> 8 & 255
    return (
        int(1 + _WIDTHS[op]) if not _COUNTED[op] else count + (3 if op == SHORT_BINUNICODE else 2)
    )


def _mask(length: int) -> np.uint64:
    return np.uint64((1 << 8 * length) - 1)


_MASKS = np.array([_mask(length) for length in range(9)])
