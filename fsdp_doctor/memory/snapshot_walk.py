"""Step through the opcodes of a pickle without executing them.

Known are the opcodes that Python's pickler writes for plain containers, numbers and texts in
protocols 4 and 5 (``Modules/_pickle.c``): every object that can be shared is memoized when it is
complete, so the memo is numbered by counting. Any other opcode is an ``UnfitError``: such a file is
for the unpickler alone. Standard library only.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable
from dataclasses import dataclass

Data = bytes | mmap.mmap

MEMOIZE, MARK, STOP, FRAME = 0x94, 0x28, 0x2E, 0x95
BINGET, LONG_BINGET = 0x68, 0x6A
BININT1, BININT2, BININT, LONG1 = 0x4B, 0x4D, 0x4A, 0x8A
SHORT_BINUNICODE, BINUNICODE = 0x8C, 0x58
NUMBERS = (BININT1, BININT2, BININT, LONG1)
_SIZES = bytes(
    {
        **dict.fromkeys(b"}]eaus)t\x85\x86\x87N\x88\x89", 1),  # containers and constants
        0x80: 2,
        BININT1: 2,
        BININT2: 3,
        BININT: 5,
        0x47: 9,  # PROTO, ints, BINFLOAT
    }.get(op, 0)
    for op in range(256)
)
MAX_KEY = 32
FREE_BYTES = 4 << 20
"""How much may be stepped through whatever the size; beyond it, an eighth of the file."""
_FETCHES = re.compile(rb"(?:h.|j.{4}){1,1000}", re.DOTALL)
_FETCH = re.compile(rb"h.|j.{4}", re.DOTALL)
_EVENT = re.compile(rb"}\x94\((?:h(.)|j(.{4}))", re.DOTALL)


class UnfitError(Exception):
    """The file has not the regular form that is looked for; nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The form of most events: dicts with these keys in this order."""

    prefix: bytes
    """An empty dict, memoized, MARK, and the key ``action``."""
    fields: tuple[tuple[str, bytes], ...]
    """The keys after it: their names and the opcode that fetches them from the memo."""
    frames: bytes | None
    """The last key, ``frames``, likewise; None: the events have no stacks."""

    def least_bytes(self) -> int:
        """No event can be shorter: keys, values of one byte, the action, and the last opcode."""
        keys = [key for _, key in self.fields] + [self.frames or b""]
        return len(self.prefix) + 2 + sum(map(len, keys)) + len(self.fields) + 1


def memo_numbers(fetches: Iterable[bytes]) -> list[int]:
    """The different numbers in rows of opcodes that fetch from the memo."""
    found: set[bytes] = set()
    for row in fetches:
        found.update(_FETCH.findall(row))
    return [int.from_bytes(fetch[1:], "little") for fetch in found]


class Walk:
    """A position in a pickle, always that of an opcode."""

    def __init__(self, data: Data, at: int = 0) -> None:
        self.data, self.end = data, len(data)
        self.at, self.memo = at, 0
        """Position, and how many objects are memoized before it."""
        self.ended = False
        self._fetched: list[int] = []
        self._fetches: set[bytes] = set()
        self.texts: dict[int, bytes] = {}
        """Memoized short texts, by number."""
        self.cuts: list[tuple[int, int, int]] = []
        """Begin, end and number of what was skipped; of a FRAME the number is -1."""
        self.stepped = 0
        self._frame_end = 0

    def until(self, stop: int) -> None:
        """Step to the first opcode at or behind ``stop``, or behind the end of the pickle.

        Raises:
            UnfitError: an opcode of another kind, the data end, or this takes too long.
        """
        if self.ended:
            return
        try:
            begin = self.at
            self._step(min(stop, self.end))
            self.stepped += self.at - begin
        except IndexError:
            raise UnfitError("cut off") from None
        if self.at > self.end or self.stepped > FREE_BYTES + self.end // 8:
            raise UnfitError("too irregular")

    def references(self) -> list[int]:
        """All numbers that were fetched from the memo, some of them several times."""
        return [*self._fetched, *memo_numbers(self._fetches)]

    def skip(self, end: int, memoized: int, number: int) -> None:
        """Go to ``end``: the objects between are known and memoize so many."""
        self.cuts.append((self.at, end, number))
        self.at, self.memo = end, self.memo + memoized

    def _frames(self, at: int) -> int:
        """Behind fetches in a row, as those of the frames of a list."""
        fetches = _FETCHES.match(self.data, at)
        if fetches is None:
            return at
        self._fetches.add(fetches[0])
        return fetches.end()

    def _frame(self, at: int) -> None:
        """A FRAME, or STOP: where the last FRAME ends, as that announced."""
        framed = self._frame_end
        if self.data[at] == FRAME:
            self.cuts.append((at, at + 9, -1))
            self._frame_end = at + 9 + int.from_bytes(self.data[at + 1 : at + 9], "little")
        else:
            at += 1
        if (framed and framed != at) or self._frame_end > self.end:
            raise UnfitError("a FRAME of another length")

    def _step(self, stop: int) -> None:  # noqa: C901, PLR0912 (a table of calls would be slower)
        data, at, memo = self.data, self.at, self.memo
        refer = self._fetched.append
        while at < stop:
            op = data[at]
            if op == MEMOIZE:
                memo += 1
                at += 1
            elif op == BINGET:
                refer(data[at + 1])
                at += 2
            elif op == LONG_BINGET:
                refer(int.from_bytes(data[at + 1 : at + 5], "little"))
                at += 5
            elif op == MARK:
                at = self._frames(at + 1)
            elif _SIZES[op]:
                at += _SIZES[op]
            elif op == SHORT_BINUNICODE:
                begin = at + 2
                at = begin + data[at + 1]
                if data[at] == MEMOIZE and at <= begin + MAX_KEY:
                    self.texts[memo] = data[begin:at]
            elif op == LONG1:
                at += 2 + data[at + 1]
            elif op == BINUNICODE:
                at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
            elif op == FRAME:
                self._frame(at)
                at = self._frames(at + 9)
            elif op == STOP:
                self._frame(at)
                self.ended = True
                at += 1
                break
            else:
                raise UnfitError(f"opcode {op:#x}")
        self.at, self.memo = at, memo


def find_layout(walk: Walk) -> Layout:
    """Step to the first event whose keys are all in the memo, and return its form.

    Raises:
        UnfitError: there is none, or its form is another than that of torch's events.
    """
    for match in _EVENT.finditer(walk.data):
        walk.until(match.start())
        if walk.ended:
            break
        key = int.from_bytes(match[1] or match[2], "little")
        if walk.at == match.start() and walk.texts.get(key) == b"action":
            return _layout(walk, match[0])
    raise UnfitError("no events")


def _layout(walk: Walk, prefix: bytes) -> Layout:
    data, fields = walk.data, {"action": b""}
    at = _behind_value(data, walk.at + len(prefix))
    while data[at] in (BINGET, LONG_BINGET):
        key = data[at : _behind_value(data, at)]
        name = walk.texts.get(int.from_bytes(key[1:], "little"), b"").decode("ascii", "replace")
        if not name or name in fields:
            break
        if name == "frames":
            return Layout(prefix, tuple(fields.items())[1:], key)
        fields[name] = key
        at = _behind_value(data, at + len(key))
    if data[at] != ord("u"):
        raise UnfitError("events of another form")
    return Layout(prefix, tuple(fields.items())[1:], None)


def _behind_value(data: Data, at: int) -> int:
    """Behind a scalar, or a pair of integers."""
    op = data[at]
    if op in (BINGET, LONG_BINGET):
        return at + (2 if op == BINGET else 5)
    if op == SHORT_BINUNICODE:
        return at + 3 + data[at + 1]
    end = at + (2 + data[at + 1] if op == LONG1 else _SIZES[op])
    if op in NUMBERS and data[end] in NUMBERS:
        second = 2 + data[end + 1] if data[end] == LONG1 else _SIZES[data[end]]
        end += second + len(b"\x86\x94")
    return end
