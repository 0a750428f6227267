"""Which files are snapshots, and of which rank.

File names: torchtitan ``rank3_memory_snapshot.pickle`` and ``000003_step_40.pickle`` in
``step_...`` or ``iteration_...`` folders, Megatron-Bridge ``snapshot_3.pickle`` and
``snapshot_oom_rank-3.pickle``, Composer ``ep0-ba1-rank3.memory_snapshot.pickle``, and any name
with ``rank3`` in it.
"""

from __future__ import annotations

import gzip
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from fsdp_doctor.errors import InputError

SUFFIXES = (".pickle", ".pkl", ".pickle.gz", ".pkl.gz")
MAX_FILES = 65536
_RANK = (
    re.compile(r"rank[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE),
    re.compile(r"^(\d{6})_step_\d+", re.IGNORECASE),
    re.compile(r"^snapshot[-_](\d{1,7})\."),
    re.compile(r"^(\d{1,7})\.(?:pickle|pkl)"),
)
_STEP = re.compile(r"(?:step|iteration|iter|ba|batch)[-_]?(\d{1,12})", re.IGNORECASE)
_FOLDER = re.compile(r"^(?:step|iteration|iter)[-_]?(\d{1,12})(_exit)?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """A snapshot file and what its name says."""

    path: Path
    rank: int | None
    step: int | None


def is_snapshot(path: Path) -> bool:
    """Whether ``path`` is a snapshot file or a directory of them, by its name and first bytes."""
    if path.is_dir():
        return not (path / "run.json").exists() and bool(_listed(path) or _step_folder(path))
    if not path.is_file():
        return False
    if path.name.lower().endswith(SUFFIXES):
        return True
    try:
        with path.open("rb") as file:
            head = file.read(2)
        if head == b"\x1f\x8b":
            with gzip.open(path) as packed:
                head = packed.read(2)
    except (OSError, EOFError, zlib.error):
        return False
    return len(head) == 2 and head[:1] == b"\x80" and head[1:] in b"\x02\x03\x04\x05"


def is_step_folder(path: Path) -> bool:
    """Whether a folder is named as those that hold the snapshots of one step."""
    return _FOLDER.match(path.name) is not None


def find_snapshots(path: Path) -> list[SnapshotFile]:
    """The snapshots of a file or directory, one per rank (its last), in order of rank.

    A directory without snapshots but with ``step_...`` folders means the last of those.

    Raises:
        InputError: there is none.
    """
    if not path.exists():
        raise InputError("no such file or directory", where=str(path))
    if not path.is_dir():
        return [_described(path)]
    found = _listed(path)
    folder = _step_folder(path)
    if not found and folder is not None:
        found = _listed(folder)
    if not found:
        raise InputError(
            "no snapshot in it", where=str(path), hint=f"named *{', *'.join(SUFFIXES)}"
        )
    newest: dict[tuple[int | None, str], SnapshotFile] = {}
    for file in sorted(found, key=_age):
        newest[file.rank, "" if file.rank is not None else file.path.name] = file
    return sorted(newest.values(), key=lambda file: (file.rank is None, file.rank or 0, file.path))


def _age(file: SnapshotFile) -> tuple[bool, int, str]:
    """Snapshots of a failure last, then by step, then by name."""
    return "oom" in file.path.name.lower(), file.step or -1, file.path.name


def _described(path: Path) -> SnapshotFile:
    rank = next((int(m[1]) for pattern in _RANK if (m := pattern.search(path.name))), None)
    step = _STEP.search(path.name)
    return SnapshotFile(path=path, rank=rank, step=int(step[1]) if step else None)


def _listed(folder: Path) -> list[SnapshotFile]:
    names = []
    for number, path in enumerate(folder.iterdir()):
        if number >= MAX_FILES:
            break
        if path.name.lower().endswith(SUFFIXES) and path.is_file():
            names.append(_described(path))
    return names


def _step_folder(folder: Path) -> Path | None:
    """The last of the ``step_...`` folders that hold snapshots."""
    numbered = [
        (int(match[1]), match[2] is not None, path)
        for path in folder.iterdir()
        if (match := _FOLDER.match(path.name)) and path.is_dir()
    ]
    for _, _, path in sorted(numbered, key=lambda entry: entry[:2], reverse=True):
        if _listed(path):
            return path
    return None
