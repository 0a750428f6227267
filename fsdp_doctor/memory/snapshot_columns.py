"""The columns of a snapshot from the object that was unpickled.

Format read here: ``torch/csrc/cuda/Module.cpp`` and ``memory_snapshot.cpp`` (torch 2.0 - 2.14), the
list of segments of torch 1.13 (``history`` per block until 2.0); unknown keys are ignored. Standard
library only.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import compress, repeat
from operator import itemgetter
from typing import Any

from fsdp_doctor.memory.snapshot_pickle import RefusedError
from fsdp_doctor.memory.snapshot_stacks import MAX_TEXT, Codes, Stacks

ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
           "segment_map", "segment_unmap", "snapshot", "oom")  # fmt: skip
OTHER = 255
OOM = ACTIONS.index("oom")
ASKING = bytes(code in (ACTIONS.index("alloc"), OOM) for code in range(256))
"""Which codes ask for memory, so that their stack is of interest."""
EVENT_COLUMNS = dict(zip(
    ("action", "addr", "size", "time", "stream", "pool", "stack"), "BQqqiii", strict=True
))  # fmt: skip
"""Names of a trace's columns and their types, as in ``array``."""
STATES = ("inactive", "active_allocated", "active_pending_free", "active_awaiting_free")
CHUNK = 1 << 12
MAX_DEVICES = 4096


class Actions(dict[Any, int]):
    """Numbers of the known actions; all others share one."""

    def __missing__(self, key: Any) -> int:
        if not isinstance(key, str):
            raise RefusedError("an action is no text")
        return OTHER


def column(rows: list[dict[str, Any]], key: str, missing: Any) -> list[Any]:
    """The values of a key; ``missing`` where there is none."""
    try:
        return list(map(itemgetter(key), rows))
    except KeyError:
        return [row.get(key, missing) for row in rows]


class Reader:
    """Turns the object into columns."""

    kinds: frozenset[type] = frozenset({dict})
    """Types of the entries of a trace."""

    def __init__(self) -> None:
        self.arrays: list[tuple[str, str, Any]] = []
        """Name, type (as in ``array``) and buffer of each column."""
        self.streams, self.pools, self.stacks = Codes(), Codes(), Stacks()
        self.streams[0], self.pools[0, 0] = 0, 0
        self.actions = Actions(zip(ACTIONS, range(len(ACTIONS)), strict=True))
        self.count = 0
        self.seen: set[int] = set()

    def put(self, name: str, code: str, values: Any) -> None:
        """Keep a column; its type is checked by the array itself."""
        # an array is filled from a list twice as fast as from an iterator
        self.arrays.append((name, code, array(code, list(values))))

    def rows(self, value: Any, what: str, kinds: frozenset[type] = frozenset({dict})) -> list[Any]:
        """A list of dicts (or other ``kinds``), once."""
        if value is None:
            return []
        if type(value) is not list:
            raise RefusedError(f"{what}: no list")
        if value and id(value) in self.seen:
            raise RefusedError(f"{what}: the same list twice")
        self.seen.add(id(value))
        self.count += len(value)
        if not kinds.issuperset(map(type, value)):
            raise RefusedError(f"{what}: an entry is no dict")
        return value

    def pool(self, value: Any) -> int:
        """The number of a private pool; 0 is the default pool."""
        if value is None:
            return 0
        first, second = value
        return self.pools[int(first), int(second)]

    def has_time(self, trace: list[Any]) -> bool:
        """Whether events have a time."""
        return bool(trace) and "time_us" in trace[0]

    def trace(self, index: int, trace: list[Any]) -> None:
        """One device's events; ``stack`` has values for allocations and ``oom`` alone."""
        columns = self.new_columns()
        for frames in self.fill(columns, trace):
            columns["stack"].fromlist(self.stacks.numbers(frames))
        for name, values in columns.items():
            self.arrays.append((f"trace/{index}/{name}", values.typecode, values))

    def new_columns(self) -> dict[str, array[Any]]:
        """The columns of a trace, empty."""
        return {name: array(code) for name, code in EVENT_COLUMNS.items()}

    def fill(
        self, columns: dict[str, array[Any]], trace: list[dict[str, Any]]
    ) -> Iterator[Iterator[Any]]:
        """Append events to all columns but ``stack``; yields the frames of those that have one.

        All columns of some thousand events are filled before the next ones: reading a million dicts
        again for each column would find none of them in the processor's cache.
        """
        for begin in range(0, len(trace), CHUNK):
            rows = trace[begin : begin + CHUNK]
            actions = self._fill(columns, rows)
            yield map(dict.get, compress(rows, actions.translate(ASKING)), repeat("frames"))

    def _fill(self, into: dict[str, array[Any]], rows: list[dict[str, Any]]) -> bytes:
        actions = bytes(map(self.actions.__getitem__, map(itemgetter("action"), rows)))
        into["action"].frombytes(actions)
        if OOM in actions:  # the one action without an address
            addr = [e["addr"] if "addr" in e else e.get("device_free", 0) for e in rows]
        else:
            addr = column(rows, "addr", 0)
        into["addr"].fromlist(addr)
        into["size"].fromlist(column(rows, "size", 0))
        into["time"].fromlist(column(rows, "time_us", 0))
        numbered = (("stream", "stream", self.stream), ("pool", "pool_id", self.pool))
        for name, key, number in numbered:
            values = column(rows, key, None)
            table = {value: number(value) for value in set(values)}
            if len(table) == 1:
                into[name].extend(array("i", table.values()) * len(rows))
            else:
                into[name].fromlist(list(map(table.__getitem__, values)))
        return actions

    def stream(self, value: Any) -> int:
        """The number of a stream; 0 is the default one."""
        return self.streams[0 if value is None else int(value)]

    def segments(self, segments: list[dict[str, Any]]) -> None:
        """Segments and their blocks, in the order of the file."""
        columns: list[list[int]] = [[] for _ in range(7)]
        blocks: list[list[int]] = [[] for _ in range(6)]
        for number, segment in enumerate(segments):
            row = (
                segment.get("device", 0),
                segment["address"],
                segment["total_size"],
                self.stream(segment.get("stream")),
                self.pool(segment.get("segment_pool_id")),
                1 if segment.get("segment_type", "large") == "large" else 0,
                1 if segment.get("is_expandable") else 0,
            )
            for column, value in zip(columns, row, strict=True):
                column.append(value)
            self.blocks(number, segment["address"], self.rows(segment["blocks"], "blocks"), blocks)
        names = ("device", "address", "size", "stream", "pool", "large", "expandable")
        for name, column in zip(names, columns, strict=True):
            self.put(f"segment/{name}", "Q" if name == "address" else "q", column)
        parts = ("segment", "address", "size", "requested", "state", "stack")
        for name, column in zip(parts, blocks, strict=True):
            self.put(f"block/{name}", "Q" if name == "address" else "q", column)

    def blocks(
        self, segment: int, address: int, blocks: list[dict[str, Any]], into: list[list[int]]
    ) -> None:
        """The blocks of one segment; ``history`` is how torch 1.13 - 2.0 wrote them."""
        for block in blocks:
            history = block.get("history") or [{}]
            state = STATES.index(block["state"]) if block["state"] in STATES else 0
            frames = block.get("frames") or history[0].get("frames")
            row = (
                segment,
                block.get("address", address),
                block["size"],
                block.get("requested_size", history[0].get("real_size", block["size"])),
                min(state, 2),
                self.stacks.number(frames) if state else -1,
            )
            for column, value in zip(into, row, strict=True):
                column.append(value)
            address = row[1] + row[2]

    def annotations(self, notes: list[dict[str, Any]]) -> list[str]:
        """Names of ``record_function`` ranges, and columns of where they begin and end."""
        names = Codes()
        for key, code in (("device", "q"), ("time_us", "q")):
            self.put(f"note/{key}", code, [note.get(key, 0) for note in notes])
        self.put("note/start", "B", [note.get("stage") == "START" for note in notes])
        self.put("note/name", "i", [names[str(note.get("name"))[:MAX_TEXT]] for note in notes])
        return list(names)


def reduce_snapshot(snapshot: Any, size: int, reader: Reader) -> dict[str, Any]:
    """The header; the columns are in the reader. Raises RefusedError, or errors of wrong types."""
    if type(snapshot) is list:  # torch 1.13
        snapshot = {"segments": snapshot}
    if type(snapshot) is not dict or "segments" not in snapshot:
        raise RefusedError("it has no segments: not a memory snapshot")
    traces = snapshot.get("device_traces")
    if not isinstance(traces, list | None) or len(traces or ()) > MAX_DEVICES:
        raise RefusedError("device_traces is no list of devices")
    parts = [reader.rows(trace, "device_traces", reader.kinds) for trace in traces or ()]
    segments = reader.rows(snapshot["segments"], "segments")
    notes = reader.rows(snapshot.get("external_annotations"), "external_annotations")
    budget = size // 8 + 1000
    for number, trace in enumerate(parts):
        if reader.count > budget:
            raise RefusedError("it repeats itself more often than its size allows")
        reader.trace(number, trace)
    reader.segments(segments)
    if reader.count > budget:
        raise RefusedError("it repeats itself more often than its size allows")
    settings = snapshot.get("allocator_settings")
    return {
        "devices": len(parts),
        "size": size,
        "names": reader.annotations(notes),
        "settings": _scalars(settings) if type(settings) is dict else {},
        "has_time": any(map(reader.has_time, parts)),
        "has_traces": traces is not None,
        "streams": [int(stream) for stream in reader.streams],
        "pools": list(reader.pools),
        "frames": list(reader.stacks.frames),
        "stacks": list(reader.stacks.stacks),
        "arrays": [(name, code, len(values)) for name, code, values in reader.arrays],
    }


def _scalars(settings: dict[Any, Any]) -> dict[str, Any]:
    return {
        str(key)[:80]: value[:MAX_TEXT] if isinstance(value, str) else value
        for key, value in settings.items()
        if isinstance(value, str | int | float | bool)
    }
