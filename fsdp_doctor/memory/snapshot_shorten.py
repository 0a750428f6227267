"""Read a large snapshot without building a dict for each of its events.

The regular events of the traces are read as columns (``snapshot_events``); the unpickler gets a
shorter pickle, in which a ``Run`` stands for each row of them. All other opcodes it executes as
they are. That it builds the same objects rests on three things: every opcode of the file is walked
or checked, so what is replaced are whole events; a run takes as many places on the stack and in the
memo; and an event to which anything but an event refers is not replaced. A file of any other form
is an ``UnfitError``, and to be read as a whole. Needs numpy.
"""

from __future__ import annotations

import io
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_doctor.memory.snapshot_events import PAIR, Bools, EventParser, Ints, Window
from fsdp_doctor.memory.snapshot_pickle import PlainUnpickler
from fsdp_doctor.memory.snapshot_walk import Data, Layout, UnfitError, Walk

LEAST_BYTES = 256
MAX_MEMO = 1 << 31
COLUMNS = {
    **dict.fromkeys(("start", "base", "addr", "size", "time", "stream", "pool"), np.int64),
    **dict.fromkeys(("action", "frames"), np.int32),
    "memo": np.uint8,
}
"""What is kept of the columns of windows, as which types."""


@dataclass(slots=True, eq=False)
class Run:
    """Stands in a trace, ``count`` times in a row, for that many events."""

    first: int
    """Index in the columns of ``Events``."""
    count: int


@dataclass(slots=True)
class Events:
    """What the runs stand for."""

    columns: dict[str, Ints]
    """``addr``, ``size``, ``time``, ``stream`` as in the file; of ``action``, ``pool`` and
    ``frames`` the index in ``objects``, -1 for no frames."""
    objects: list[Any]
    runs: list[Run]
    has_time: bool


class RunUnpickler(PlainUnpickler):
    """Puts runs in their places; the walk has seen that the file has no persistent ids itself."""

    def __init__(self, file: io.BytesIO, runs: list[Run]) -> None:
        super().__init__(file)
        self._runs = runs

    def persistent_load(self, pid: Any) -> Run:
        """The run of that number."""
        run: Run = self._runs[pid]
        return run


def load_shortened(walk: Walk, layout: Layout) -> tuple[Any, int, Events]:
    """The snapshot with runs in its traces, the bytes it took, and what the runs stand for.

    ``walk`` stands at the first event of that layout.

    Raises:
        UnfitError: the file cannot be read like this.
    """
    if walk.end < LEAST_BYTES:
        raise UnfitError("too small")
    parser = EventParser(walk.data, layout)
    rows = Rows(walk.data, parser)
    rows.find(walk)
    loose = rows.find_loose(walk.references())
    lists = rows.frame_lists(loose)
    fetched = different(np.concatenate([rows.names(), -1 - lists[lists < 0]]))
    runs: list[Run] = []
    bodies = parser.bodies.known
    body = b"".join([
        *rows.shortened(walk, loose, runs),
        b"(",
        *(b"]" + frames for frames in bodies),
        *(b"j" + struct.pack("<I", number) for number in fetched.tolist()),
        b"t\x86.",
    ])  # fmt: skip
    frame = b"\x80\x04\x95" + struct.pack("<Q", len(body))
    snapshot, objects = RunUnpickler(io.BytesIO(frame + body), runs).load()
    columns = {name: rows.columns[name] for name in ("addr", "size", "time", "stream")}
    pool, pairs = _pools(rows.columns["pool"], fetched, len(bodies))
    columns["pool"] = pool
    columns["action"] = len(bodies) + np.searchsorted(fetched, rows.columns["action"])
    columns["frames"] = np.where(
        lists < 0, len(bodies) + np.searchsorted(fetched, -1 - lists), lists - 1
    )
    has_time = "time_us" in dict(parser.layout.fields)
    return snapshot, walk.at, Events(columns, [*objects, *pairs], runs, has_time)


def _pools(pool: Ints, fetched: Ints, bodies: int) -> tuple[Ints, list[tuple[int, int]]]:
    """Indexes in the objects, and the objects that come last: pools written as two numbers."""
    pairs: Ints = np.unique(pool[pool >= PAIR])
    low = (1 << 31) - 1
    tuples = [(pair >> 31 & low, pair & low) for pair in pairs.tolist()]
    written = bodies + len(fetched) + np.searchsorted(pairs, pool)
    return np.where(pool < PAIR, bodies + np.searchsorted(fetched, pool), written), tuples


def different(numbers: Ints) -> Ints:
    """The different ones of many small numbers, in order."""
    seen = np.zeros(int(numbers.max(initial=-1)) + 1, np.bool_)
    seen[numbers] = True
    return np.flatnonzero(seen)


class Rows:
    """The rows of events of a file, and where they stand in its memo."""

    def __init__(self, data: Data, parser: EventParser) -> None:
        self.data, self.parser = data, parser
        self.columns: dict[str, npt.NDArray[Any]] = {}
        self.base: Ints = np.zeros(0, np.int64)
        """Per event, how many objects are memoized before it."""
        self.firsts: list[int] = []
        """Per row, its first event."""
        self.ends: list[int] = []
        """Per row, the position behind it."""

    def find(self, walk: Walk) -> None:
        """Walk to the end of the pickle; rows of events are skipped.

        Raises:
            UnfitError: as the walk; or an event fetches what is not in the memo yet.
        """
        # room for as many events as there can be: what is not used costs nothing
        room = len(self.data) // self.parser.layout.least_bytes() + 1
        self.columns = {name: np.empty(room, dtype) for name, dtype in COLUMNS.items()}
        count = spent = 0
        for window in self.parser.windows(walk.at):
            columns = window.columns
            total = np.cumsum(columns["memo"])
            columns["base"] = before = total - columns["memo"]
            kept, taken = np.zeros(len(before), np.bool_), 0
            for first, last in window.runs():
                walk.until(int(columns["start"][first]))
                if walk.at != columns["start"][first] or walk.ended:
                    continue  # it only looks like events, within something else
                memoized = int(total[last - 1] - before[first])
                before[first:last] += walk.memo - before[first]
                self.ends.append(int(columns["end"][last - 1]))
                walk.skip(self.ends[-1], memoized, len(self.firsts))
                self.firsts.append(count + taken)
                taken += last - first
                kept[first:last] = True
            self._check(window, kept)
            for name, column in self.columns.items():
                column[count : count + taken] = columns[name][kept]
            count += taken
            walk.stepped += self.parser.bodies.size - spent
            spent = self.parser.bodies.size
        walk.until(walk.end)
        if not walk.ended or not count or walk.memo >= MAX_MEMO:
            raise UnfitError("cut off, or without rows of events")
        self.columns = {name: column[:count] for name, column in self.columns.items()}
        self.base = self.columns["base"]

    def _check(self, window: Window, kept: Bools) -> None:
        """Raise UnfitError where an event fetches from the memo what comes later."""
        largest = np.array(self.parser.bodies.largest)
        most = largest[np.maximum(window.columns["frames"], 0)]
        late = np.maximum(most, window.most) >= window.columns["base"]
        if (late & kept).any():
            raise UnfitError("it fetches what comes later")

    def owner(self, numbers: Ints) -> Ints:
        """The events that memoize these numbers; -1: something else does."""
        event = np.searchsorted(self.base, numbers, "right") - 1
        inside = (event >= 0) & (numbers < self.base[event] + self.columns["memo"][event])
        return np.where(inside, event, -1)

    def names(self) -> Ints:
        """Memo numbers of actions and pools."""
        pool = self.columns["pool"]
        return np.union1d(different(self.columns["action"]), different(pool[pool < PAIR]))

    def find_loose(self, references: list[int]) -> set[int]:
        """Events that must stay, because something outside of all rows refers to them."""
        frames = self.columns["frames"]
        lists = different(-1 - frames[frames < 0])
        bodies = [number for numbers in self.parser.bodies.references for number in numbers]
        outside = (np.fromiter(more, np.int64) for more in (references, bodies))
        numbers = np.unique(np.concatenate([*outside, self.names(), lists[self.owner(lists) < 0]]))
        loose: set[int] = set()
        while True:
            event = self.owner(numbers)
            fresh = set(event[event >= 0].tolist()) - loose
            if not fresh:
                return loose
            loose |= fresh
            walk = Walk(self.data)
            for index in fresh:
                walk.at = int(self.columns["start"][index])
                walk.until(self._end(index))
            numbers = np.unique(np.fromiter(walk.references(), np.int64))

    def frame_lists(self, loose: set[int]) -> Ints:
        """Per event the number of its frames' body, 0 for none, or -1 - memo number.

        Raises:
            UnfitError: the frames are something else than the list of an event.
        """
        frames = self.columns["frames"]
        referring = np.flatnonzero(frames < 0)
        number = -1 - frames[referring]
        owner = self.owner(number)
        inside = (owner >= 0) & ~np.isin(owner, list(loose))
        referring, number, owner = referring[inside], number[inside], owner[inside]
        # the list is the last object of an event that has its own
        last = self.base[owner] + self.columns["memo"][owner] - 1
        if ((number != last) | (frames[owner] < 0)).any():
            raise UnfitError("frames of another kind")
        found = frames.copy()
        found[referring] = frames[owner]
        return np.asarray(found)

    def _end(self, index: int) -> int:
        """Where an event ends: where the next one of its row begins, or the row ends."""
        row = bisect_right(self.firsts, index) - 1
        last = self.firsts[row + 1] if row + 1 < len(self.firsts) else len(self.base)
        return int(self.columns["start"][index + 1]) if index + 1 < last else self.ends[row]

    def shortened(self, walk: Walk, loose: set[int], runs: list[Run]) -> Iterator[bytes]:
        """The pickle up to its STOP in pieces, without FRAMEs; adds to ``runs``."""
        at = 0
        lasts = [*self.firsts[1:], len(self.base)]
        standing = sorted(loose)
        for begin, end, row in walk.cuts:
            yield self.data[at:begin]
            at = end
            if row >= 0:
                yield from self._row(self.firsts[row], lasts[row], standing, runs)
        yield self.data[at : walk.at - 1]

    def _row(self, first: int, last: int, standing: list[int], runs: list[Run]) -> Iterator[bytes]:
        memo = self.columns["memo"]
        stay = standing[bisect_left(standing, first) : bisect_left(standing, last)]
        for index in [*stay, last]:
            if index > first:
                memoized = self.base[index - 1] + memo[index - 1] - self.base[first]
                yield b"J" + struct.pack("<i", len(runs)) + b"Q" + b"\x94" * int(memoized)
                yield b"2" * (index - first - 1)
                runs.append(Run(first, index - first))
            if index < last:
                yield self.data[int(self.columns["start"][index]) : self._end(index)]
            first = index + 1
