"""The process that opens a memory snapshot. Run as a script (``python -I -S``), never imported.

A pickle is a program. This one runs with nothing but plain containers to build (no class, no
function, no persistent id can be named), in a process of its own whose memory, CPU time, files and
children the kernel bounds. What it holds leaves as numbers in columns and a table of stacks; the
parent never unpickles anything. Standard library only.

Format read here: ``torch/csrc/cuda/Module.cpp`` and ``memory_snapshot.cpp`` (torch 2.0 - 2.14), the
list of segments of torch 1.13 (``history`` per block until 2.0); unknown keys are ignored.

Arguments: JSON with ``memory_base``, ``memory_factor``, ``cpu_base_s``, ``cpu_bytes_per_s``. The
file is standard input; standard output gets an 8-byte length, a JSON header, then raw arrays.
"""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import pickle
import re
import resource
import struct
import sys
from array import array
from collections.abc import Iterable
from itertools import compress, repeat
from operator import itemgetter
from typing import Any, BinaryIO

ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
           "segment_map", "segment_unmap", "snapshot", "oom")  # fmt: skip
OTHER = 255
OOM = ACTIONS.index("oom")
_ASKING = bytes(code in (ACTIONS.index("alloc"), OOM) for code in range(256))
"""Which codes ask for memory, so that their stack is of interest."""
STATES = ("inactive", "active_allocated", "active_pending_free", "active_awaiting_free")
MAX_TEXT = 400
BUFFER = 1 << 20
CHUNK = 1 << 12
MAX_DEVICES = 4096
_OPERATOR = re.compile(r"^at::_ops::(\w+)::(?:call|redispatch)\(")


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


def set_limits(options: dict[str, float], size: int) -> None:
    """Bound this process by the size of what it reads."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = min(int(options["memory_base"] + options["memory_factor"] * size), physical)
    cpu_s = int(options["cpu_base_s"] + size / options["cpu_bytes_per_s"]) + 1
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 8,
    }
    for which, limit in limits.items():
        _, hard = resource.getrlimit(which)
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (bound, bound))


def declared_size(file: BinaryIO, size: int) -> int:
    """Bytes after decompression as the file declares them, at most 256 times its own."""
    if file.read(2) != b"\x1f\x8b":
        file.seek(0)
        return size
    file.seek(-4, io.SEEK_END)
    (declared,) = struct.unpack("<I", file.read(4))
    file.seek(0)
    return int(max(min(declared, 256 * size), 8 * size))


def load(file: BinaryIO) -> tuple[Any, int]:
    """The object and the bytes it took, decompressed."""
    head = file.read(4)
    file.seek(0)
    if not head:
        raise RefusedError("it is empty")
    if head[:2] == b"PK":
        raise RefusedError("it is a zip archive (torch.save), not a memory snapshot")
    stream: Any = gzip.GzipFile(fileobj=file) if head[:2] == b"\x1f\x8b" else file
    if stream is not file:
        stream = io.BufferedReader(stream, 1 << 16)
    try:
        loaded = PlainUnpickler(stream).load()
    except EOFError:
        raise RefusedError("it ends before its end: cut off, or no pickle") from None
    return loaded, stream.tell()


class Codes(dict[Any, int]):
    """Numbers for values in order of appearance."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


class Actions(dict[Any, int]):
    """Numbers of the known actions; all others share one."""

    def __missing__(self, key: Any) -> int:
        if not isinstance(key, str):
            raise RefusedError("an action is no text")
        return OTHER


class Stacks:
    """Every different stack once: its Python frames and the ATen operator."""

    def __init__(self) -> None:
        self.frames = Codes()
        self.stacks = Codes()
        self._near: dict[tuple[int, int, int], tuple[list[Any], int]] = {}
        self._exact: dict[tuple[int, ...], int] = {}

    def number(self, frames: Any) -> int:
        """The stack's number, -1 for none.

        Stacks share their frames: equal ones hold the same objects, and most that differ do so in
        one of three places.
        """
        if not frames:
            return -1
        if type(frames) is not list:
            raise RefusedError("frames are no list")
        n = len(frames)
        key = id(frames[0]), id(frames[n >> 2]), id(frames[n >> 1])
        near = self._near.get(key)
        if near is None:
            number = self._add(frames)
            self._near[key] = frames, number
            return number
        if near[0] == frames:
            return near[1]
        exact = tuple(map(id, frames))
        known = self._exact.get(exact)
        if known is None:
            known = self._exact[exact] = self._add(frames)
        return known

    def numbers(self, many: Iterable[Any]) -> list[int]:
        """``number`` of each: its most frequent way, without a call for each."""
        near_get, number = self._near.get, self.number
        found: list[int] = []
        append = found.append
        for frames in many:
            if type(frames) is list and frames:
                n = len(frames)
                near = near_get((id(frames[0]), id(frames[n >> 2]), id(frames[n >> 1])))
                if near is not None and near[0] == frames:
                    append(near[1])
                    continue
            append(number(frames))
        return found

    def _add(self, frames: list[Any]) -> int:
        found, operator = [], ""
        for frame in frames:
            file, line, name = frame["filename"], frame["line"], frame["name"]
            if file == "??":
                match = None if operator else _OPERATOR.match(name)
                operator = match[1] if match else operator
            else:
                place = (str(file)[-MAX_TEXT:], int(line), str(name)[:MAX_TEXT])
                found.append(self.frames[place])
        if not found and not operator:
            return -1
        return self.stacks[tuple(found), operator]


def column(rows: list[dict[str, Any]], key: str, missing: Any) -> list[Any]:
    """The values of a key; ``missing`` where there is none."""
    try:
        return list(map(itemgetter(key), rows))
    except KeyError:
        return [row.get(key, missing) for row in rows]


class Reader:
    """Turns the object into columns."""

    def __init__(self) -> None:
        self.arrays: list[tuple[str, array[Any]]] = []
        self.streams, self.pools, self.stacks = Codes(), Codes(), Stacks()
        self.streams[0], self.pools[0, 0] = 0, 0
        self.count = 0
        self.seen: set[int] = set()

    def put(self, name: str, code: str, values: Any) -> None:
        """Keep a column; its type is checked by the array itself."""
        # an array is filled from a list twice as fast as from an iterator
        self.arrays.append((name, array(code, list(values))))

    def rows(self, value: Any, what: str) -> list[dict[str, Any]]:
        """A list of dicts, once."""
        if value is None:
            return []
        if type(value) is not list:
            raise RefusedError(f"{what}: no list")
        if value and id(value) in self.seen:
            raise RefusedError(f"{what}: the same list twice")
        self.seen.add(id(value))
        self.count += len(value)
        if not {dict}.issuperset(map(type, value)):
            raise RefusedError(f"{what}: an entry is no dict")
        return value

    def pool(self, value: Any) -> int:
        """The number of a private pool; 0 is the default pool."""
        if value is None:
            return 0
        first, second = value
        return self.pools[int(first), int(second)]

    def trace(self, index: int, trace: list[dict[str, Any]]) -> None:
        """One device's events; ``stack`` has values for allocations and ``oom`` alone.

        All columns of some thousand events are filled before the next ones: reading a million dicts
        again for each column would find none of them in the processor's cache.
        """
        codes = Actions(zip(ACTIONS, range(len(ACTIONS)), strict=True))
        names = ("action", "addr", "size", "time", "stream", "pool", "stack")
        columns = {name: array(code) for name, code in zip(names, "BQqqiii", strict=True)}
        for begin in range(0, len(trace), CHUNK):
            self._events(trace[begin : begin + CHUNK], codes, columns)
        self.arrays += [(f"trace/{index}/{name}", column) for name, column in columns.items()]

    def _events(
        self, rows: list[dict[str, Any]], codes: Actions, into: dict[str, array[Any]]
    ) -> None:
        actions = bytes(map(codes.__getitem__, map(itemgetter("action"), rows)))
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
        asking = compress(rows, actions.translate(_ASKING))
        into["stack"].fromlist(self.stacks.numbers(map(dict.get, asking, repeat("frames"))))

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


def reduce_snapshot(snapshot: Any, size: int) -> tuple[dict[str, Any], Reader]:
    """The header and the columns. Raises RefusedError, or the errors of wrong types."""
    if type(snapshot) is list:  # torch 1.13
        snapshot = {"segments": snapshot}
    if type(snapshot) is not dict or "segments" not in snapshot:
        raise RefusedError("it has no segments: not a memory snapshot")
    reader = Reader()
    traces = snapshot.get("device_traces")
    if not isinstance(traces, list | None) or len(traces or ()) > MAX_DEVICES:
        raise RefusedError("device_traces is no list of devices")
    parts = [reader.rows(trace, "device_traces") for trace in traces or ()]
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
    header = {
        "devices": len(parts),
        "size": size,
        "names": reader.annotations(notes),
        "settings": _scalars(settings) if type(settings) is dict else {},
        "has_time": any(trace and "time_us" in trace[0] for trace in parts),
        "has_traces": traces is not None,
        "streams": [int(stream) for stream in reader.streams],
        "pools": list(reader.pools),
        "frames": list(reader.stacks.frames),
        "stacks": list(reader.stacks.stacks),
        "arrays": [(name, values.typecode, len(values)) for name, values in reader.arrays],
    }
    return header, reader


def _scalars(settings: dict[Any, Any]) -> dict[str, Any]:
    return {
        str(key)[:80]: value[:MAX_TEXT] if isinstance(value, str) else value
        for key, value in settings.items()
        if isinstance(value, str | int | float | bool)
    }


def main() -> int:
    """Read standard input, write columns; every failure is one line of the header."""
    gc.disable()
    out = sys.stdout.buffer
    reader = None
    try:
        size = os.fstat(0).st_size
        with os.fdopen(os.dup(0), "rb", BUFFER) as file:
            set_limits(json.loads(sys.argv[1]), declared_size(file, size))
            loaded, used = load(file)
        header, reader = reduce_snapshot(loaded, used)
    except RefusedError as error:
        header = {"error": str(error)}
    except MemoryError:
        header = {"error": "it asks for more memory than a snapshot of its size needs"}
    except RecursionError:
        header = {"error": "it is nested deeper than a snapshot is"}
    except Exception as error:  # noqa: BLE001 (whatever a hostile file provokes is one line)
        header = {"error": f"not a memory snapshot: {type(error).__name__}: {error}"[:300]}
    text = json.dumps(header).encode()
    out.write(struct.pack("<q", len(text)) + text)
    if reader is not None:
        for _, values in reader.arrays:
            out.write(memoryview(values))
    out.flush()
    os._exit(0)  # nothing to tidy up: freeing a million dicts one by one takes longer than reading


if __name__ == "__main__":
    main()
