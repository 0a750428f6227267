"""Which files are logs, and what their names tell: rank, local rank, host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_doctor.errors import InputError
from fsdp_doctor.logs.records import Origin

MAX_FILES = 20_000
_EXTENSIONS = frozenset({".log", ".out", ".err", ".txt", ".json", ".stderr", ".stdout", ".gz", ""})
_NOT_LOGS = frozenset({"run.json", "config.json", "tokenizer.json", "package.json"})
_BINARY = (b"\x7fELF", b"PK\x03\x04", b"\x89PNG", b"%PDF", b"\x80\x02", b"\x80\x04", b"\x80\x05")
_RANK = re.compile(r"(?:^|[^a-z])(?:global_?)?r(?:ank)?[_\-=.]?(\d{1,6})(?=[^\d]|$)", re.I)
_TASK = re.compile(r"(?:task|proc)[_\-=.]?(\d{1,6})(?=[^\d]|$)", re.I)
_LOCAL = re.compile(r"/(\d{1,4})/(?:std(?:out|err)\.log|error\.json)$")
_LOCAL_NAME = re.compile(r"local_?rank[_\-=.]?(\d{1,4})", re.I)
_HOST = re.compile(r"(?:^|[/_\-.])((?:node|host|worker|pod)[_-]?\d{1,6})(?=[_/.\-]|$)", re.I)


@dataclass(frozen=True, slots=True)
class LogFile:
    """One log and what its name tells."""

    path: Path | None
    """None: standard input."""
    name: str
    origin: Origin


def find_logs(paths: Sequence[Path]) -> tuple[list[LogFile], list[str]]:
    """Return the logs among files and directories, and what was left out.

    Raises InputError when there is nothing to read.
    """
    found: list[LogFile] = []
    skipped: list[str] = []
    for path in paths:
        if str(path) == "-":
            found.append(LogFile(None, "-", Origin()))
        elif path.is_dir():
            found += _in_directory(path, skipped)
        else:
            with path.open("rb") as file:
                if file.read(8).startswith(_BINARY):
                    raise InputError("not a log", where=str(path), hint="text or gzip is read")
            found.append(LogFile(path, str(path), name_origin(str(path))))
    if not found:
        places = ", ".join(str(path) for path in paths)
        raise InputError("no logs here", where=places, hint="logs end in .log, .out, .err, .txt")
    return found, skipped


def _in_directory(directory: Path, skipped: list[str]) -> list[LogFile]:
    logs: list[LogFile] = []
    for path in sorted(directory.rglob("*")):
        if len(logs) >= MAX_FILES:
            skipped.append(f"{directory}: only the first {MAX_FILES} files were read")
            break
        if path.is_symlink() or not path.is_file():
            continue
        if not _may_be_log(path):
            skipped.append(str(path))
            continue
        logs.append(LogFile(path, str(path), name_origin(str(path.relative_to(directory)))))
    return logs


def _may_be_log(path: Path) -> bool:
    suffix = path.suffix.lower()
    if path.name.startswith(".") or path.name in _NOT_LOGS:
        return False
    if suffix not in _EXTENSIONS and not re.fullmatch(r"\.\d+", suffix):
        return False
    if suffix == ".json" and not path.name.startswith(("error", "reply")):
        return False
    try:
        with path.open("rb") as file:
            head = file.read(1024)
    except OSError:
        return False
    if head.startswith(_BINARY):
        return False
    return head[:2] in (b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff") or head.count(0) <= len(head) // 2


def name_origin(name: str) -> Origin:
    """Return what a file's name tells of its rank and host."""
    name = "/" + name.replace("\\", "/")
    origin = Origin()
    local = _LOCAL.search(name) or _LOCAL_NAME.search(name)
    if local is not None:
        origin.local_rank = int(local[1])
    tail = "/".join(name.split("/")[-2:])
    rank = _RANK.search(_LOCAL_NAME.sub("", tail)) or _TASK.search(tail)
    if rank is not None:
        origin.rank = int(rank[1])
    host = _HOST.search(tail)
    if host is not None:
        origin.host = host[1]
    return origin
