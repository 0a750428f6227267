"""Open a memory snapshot without trusting it.

The pickle is read by ``snapshot_child.py`` in a process of its own; only its numbers and texts
arrive here. A file that wants code, more memory or more time than a snapshot of its size needs, or
that is cut off, ends in one ``InputError``.
"""

from __future__ import annotations

import json
import signal
import stat
import struct
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from fsdp_doctor.errors import InputError
from fsdp_doctor.memory.cuda_trace import format_frames
from fsdp_doctor.memory.snapshot_columns import ACTIONS
from fsdp_doctor.redact import redact_text

Ints = npt.NDArray[np.int64]

ACTION = {name: number for number, name in enumerate(ACTIONS)}
INACTIVE, ALLOCATED, PENDING_FREE = 0, 1, 2
"""States of a block."""
_CHILD = Path(__file__).with_name("snapshot_child.py")
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_ENVIRONMENT = {**dict.fromkeys(_THREADS, "1"), "NUMPY_MADVISE_HUGEPAGE": "0"}
"""Of the child: numpy alone, and no pages of 2 MiB, which are slow to clear and half used."""
_DTYPES = {"B": np.uint8, "i": np.int32, "q": np.int64, "Q": np.uint64}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLimits:
    """What reading may cost, by the size of the (decompressed) file.

    Measured with CPython 3.11: 3 to 7 bytes of memory per byte, 70 - 140 MB per CPU second.
    """

    memory_base: int = 256 << 20
    memory_factor: float = 12.0
    cpu_base_s: float = 10.0
    cpu_bytes_per_s: float = 4e6
    wall_s: float = 3600.0
    large_bytes: int = 32 << 20
    """From this size on the events are read without the unpickler, where their form allows it;
    below there is little to gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Where a block was asked for."""

    frames: tuple[str, ...]
    """Python frames, innermost first, as ``file:line function``."""
    operator: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One device's events, as columns in the order of the file."""

    action: npt.NDArray[np.uint8]
    """``ACTION``; 255 for one that is not known."""
    addr: Ints
    """Of an ``oom``: the free bytes of the device."""
    size: Ints
    """As requested; of segments as reserved."""
    time: Ints
    stream: Ints
    pool: Ints
    stack: Ints
    """Index in ``Snapshot.stacks``; -1: none, or neither an allocation nor an ``oom``."""

    def __len__(self) -> int:
        return len(self.action)

    def where(self, *actions: str) -> Ints:
        """Indexes of the events of these kinds, in order."""
        wanted = np.zeros(256, dtype=bool)
        wanted[[ACTION[name] for name in actions]] = True
        return np.flatnonzero(wanted[self.action])


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A snapshot as columns."""

    path: Path
    size_bytes: int
    """Decompressed."""
    traces: tuple[Trace, ...]
    """One per visible device."""
    segments: dict[str, Ints]
    """device, address, size, stream, pool, large, expandable."""
    blocks: dict[str, Ints]
    """segment (index), address, size, requested, state, stack."""
    notes: dict[str, Ints]
    """device, time_us, start (0/1), name (index in ``note_names``)."""
    note_names: tuple[str, ...]
    stacks: tuple[Stack, ...]
    streams: tuple[int, ...]
    pools: tuple[tuple[int, int], ...]
    settings: dict[str, Any] = field(default_factory=dict)
    has_time: bool = False
    has_traces: bool = False

    def devices(self) -> list[int]:
        """Devices of which anything is known, the one with the most events first."""
        counts = {index: len(trace) for index, trace in enumerate(self.traces) if len(trace)}
        for device in np.unique(self.segments["device"]).tolist():
            counts.setdefault(device, 0)
        return sorted(counts, key=lambda device: (-counts[device], device))


def read_snapshot(path: Path, limits: ReadLimits | None = None) -> Snapshot:
    """Read a snapshot file, plain or gzip.

    Raises:
        InputError: it cannot be opened, is no snapshot, or wants what no snapshot needs.
    """
    limits = limits or ReadLimits()
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError("not a regular file", where=str(path))
        with path.open("rb") as file:
            header, body = _run_child(file, limits, path)
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path)) from None
    return _assemble(path, header, _columns(header, body))


def _run_child(
    file: IO[bytes], limits: ReadLimits, path: Path
) -> tuple[dict[str, Any], memoryview]:
    options = {**asdict(limits), "packages": str(Path(np.__file__).parents[1])}
    command = [sys.executable, "-I", "-S", str(_CHILD), json.dumps(options)]
    child = subprocess.Popen(
        command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_ENVIRONMENT
    )
    try:
        output, _ = child.communicate(timeout=limits.wall_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        raise InputError("reading it takes too long", where=str(path)) from None
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise InputError(
            "reading it takes more time than a snapshot of its size needs", where=str(path)
        )
    if child.returncode != 0 or len(output) < 8:
        raise InputError("it breaks the reader: not a memory snapshot", where=str(path))
    (length,) = struct.unpack_from("<q", output)
    header: dict[str, Any] = json.loads(output[8 : 8 + length])
    if "error" in header:
        raise InputError(header["error"], where=str(path))
    return header, memoryview(output)[8 + length :]


def _columns(header: dict[str, Any], body: memoryview) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    offset = 0
    for name, code, count in header["arrays"]:
        dtype = np.dtype(_DTYPES[code])
        column = np.frombuffer(body, dtype, count, offset)
        offset += dtype.itemsize * count
        columns[name] = column.view(np.int64) if code == "Q" else column
    return columns


def _group(columns: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): values
        for name, values in columns.items()
        if name.startswith(prefix)
    }


def _trace(columns: dict[str, Any]) -> Trace:
    """A trace; stacks came for the events alone that ask for memory."""
    action = columns["action"]
    stack = np.full(len(action), -1, dtype=np.int32)
    stack[(action == ACTION["alloc"]) | (action == ACTION["oom"])] = columns["stack"]
    return Trace(**{**columns, "stack": stack})


def _assemble(path: Path, header: dict[str, Any], columns: dict[str, Any]) -> Snapshot:
    frames = format_frames(
        {"filename": redact_text(file), "line": line, "name": name}
        for file, line, name in header["frames"]
    )
    stacks = tuple(
        Stack(
            frames=tuple(frames[i] for i in indexes),
            operator=f"aten.{operator}" if operator else None,
        )
        for indexes, operator in header["stacks"]
    )
    return Snapshot(
        path=path,
        size_bytes=header["size"],
        traces=tuple(
            _trace(_group(columns, f"trace/{index}/")) for index in range(header["devices"])
        ),
        segments=_group(columns, "segment/"),
        blocks=_group(columns, "block/"),
        notes=_group(columns, "note/"),
        note_names=tuple(header["names"]),
        stacks=stacks,
        streams=tuple(header["streams"]),
        pools=tuple((first, second) for first, second in header["pools"]),
        settings=header["settings"],
        has_time=header["has_time"],
        has_traces=header["has_traces"],
    )
