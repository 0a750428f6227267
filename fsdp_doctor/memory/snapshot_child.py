"""The process that opens a memory snapshot. Run as a script (``python -I -S``).

A pickle is a program. This one runs with nothing but plain containers to build (no class, no
function, no persistent id can be named), in a process of its own whose memory, CPU time, files and
children the kernel bounds. What it holds leaves as numbers in columns and a table of stacks; the
parent never unpickles anything. Standard library, and numpy for large files.

Arguments: JSON with ``memory_base``, ``memory_factor``, ``cpu_base_s``, ``cpu_bytes_per_s``,
``large_bytes``, and ``packages``, the folder that holds numpy. The file is standard input; standard
output gets an 8-byte length, a JSON header, then raw arrays.
"""

from __future__ import annotations

import gc
import gzip
import io
import json
import mmap
import os
import resource
import struct
import sys
import types
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from fsdp_doctor.memory.snapshot_columns import Reader

BUFFER = 1 << 20


def stand_alone() -> None:
    """Let modules beside this one be imported without their packages, which import others."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib is slow)
    for name, path in (("fsdp_doctor", os.path.dirname(here)), ("fsdp_doctor.memory", here)):  # noqa: PTH120
        package = types.ModuleType(name)
        package.__path__ = [path]
        sys.modules[name] = package


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


def read(file: BinaryIO, size: int, options: dict[str, Any]) -> tuple[dict[str, Any], Reader]:
    """The header and the columns.

    A large file is read by ``snapshot_shorten`` where it can be. If anything at all is wrong with
    it, it is read as a whole, which says what.
    """
    from fsdp_doctor.memory.snapshot_columns import Reader, reduce_snapshot
    from fsdp_doctor.memory.snapshot_pickle import load

    if size >= options["large_bytes"]:
        try:
            return _read_large(file, size, options["packages"])
        except Exception:  # noqa: BLE001
            file.seek(0)
    reader = Reader()
    return reduce_snapshot(*load(file), reader), reader


def _read_large(file: BinaryIO, size: int, packages: str) -> tuple[dict[str, Any], Reader]:
    from fsdp_doctor.memory.snapshot_columns import reduce_snapshot
    from fsdp_doctor.memory.snapshot_walk import Walk, find_layout

    if os.fstat(file.fileno()).st_size == size:
        data: bytes | mmap.mmap = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    else:
        data = gzip.GzipFile(fileobj=file).read(size)
    walk = Walk(data)
    layout = find_layout(walk)
    sys.path.append(packages)  # numpy, which files of another form do without
    from fsdp_doctor.memory.snapshot_merge import MergingReader
    from fsdp_doctor.memory.snapshot_shorten import load_shortened

    snapshot, used, events = load_shortened(walk, layout)
    reader = MergingReader(events)
    header = reduce_snapshot(snapshot, used, reader)
    reader.check()
    return header, reader


def main() -> int:
    """Read standard input, write columns; every failure is one line of the header."""
    gc.disable()
    stand_alone()
    from fsdp_doctor.memory.snapshot_pickle import RefusedError

    out = sys.stdout.buffer
    reader = None
    try:
        options = json.loads(sys.argv[1])
        size = os.fstat(0).st_size
        with os.fdopen(os.dup(0), "rb", BUFFER) as file:
            size = declared_size(file, size)
            set_limits(options, size)
            header, reader = read(file, size, options)
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
        for *_, values in reader.arrays:
            out.write(memoryview(values))
    out.flush()
    os._exit(0)  # nothing to tidy up: freeing a million dicts one by one takes longer than reading


if __name__ == "__main__":
    main()
