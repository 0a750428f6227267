"""Reading logs: prefixes, streams, compression, encodings, long lines, damaged files."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from fsdp_doctor.errors import InputError
from fsdp_doctor.logs.prefix import split_prefix, time_in
from fsdp_doctor.logs.scan import ScannedLogs, scan_logs
from fsdp_doctor.logs.sources import find_logs, name_origin

FIXTURES = Path(__file__).parent.parent / "fixtures" / "logs"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total"


def scan(*paths: Path) -> ScannedLogs:
    """Read files."""
    return scan_logs(find_logs(list(paths))[0])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[rank12]: x", {"rank": 12}),
        ("[default3]:[rank11]: x", {"local_rank": 3, "rank": 11}),
        (" 7: x", {"rank": 7}),
        ("[1,5]<stderr>:x", {"rank": 5}),
        ("[rank=4] x", {"rank": 4}),
        ("[rank: 4] x", {"rank": 4}),
        ("\x1b[36m(TrainWorker pid=812, ip=10.0.0.7)\x1b[0m x", {"pid": 812, "host": "10.0.0.7"}),
        ("[pod/train-worker-2/pytorch] x", {"host": "train-worker-2"}),
        ("2026-01-02T03:04:05.5Z stderr F x", {"time": 1767323045.5}),
        ("worker-3: [2026-01-02 03:04:05,000] x", {"host": "worker-3", "time": 1767323045.0}),
        ("n7:100:200 [6] NCCL WARN x", {"host": "n7", "pid": 100, "local_rank": 6}),
        ("[2026-01-02 03:04:05] x on rank 9.", {"rank": 9}),
        ("no prefix: at all", {"rank": None, "host": None, "pid": None, "time": None}),
    ],
)
def test_prefixes(line: str, expected: dict[str, object]) -> None:
    """Launchers' prefixes tell rank, host, process and time."""
    origin, _ = split_prefix(line)
    assert {name: getattr(origin, name) for name in expected} == expected


def test_times_without_a_year() -> None:
    """A glog time needs the year from elsewhere; a wrong date is no time."""
    assert time_in("E0102 03:04:05.500000 9 a.py:1] x") is None
    assert time_in("E0102 03:04:05.500000 9 a.py:1] x", 2026) == 1767323045.5
    assert time_in("2026-99-02 03:04:05") is None


@pytest.mark.parametrize(
    ("name", "rank", "local", "host"),
    [
        ("logs/rank_12.log", 12, None, None),
        ("node3-rank7.out", 7, None, "node3"),
        ("run/attempt_0/3/stderr.log", None, 3, None),
        ("worker-1.log", None, None, "worker-1"),
        ("train.log", None, None, None),
        ("param.log", None, None, None),
    ],
)
def test_file_names_tell_ranks(
    name: str, rank: int | None, local: int | None, host: str | None
) -> None:
    """A file's name tells rank, local rank and host where it has them."""
    origin = name_origin(name)
    assert (origin.rank, origin.local_rank, origin.host) == (rank, local, host)


def test_interleaved_stream() -> None:
    """In a stream of eight ranks line and frames are those of the failing rank."""
    path = FIXTURES / "megatron_interleaved.log"
    failure = next(f for f in scan(path).failures if f.kind == "device_oom")
    assert (failure.rank, failure.local_rank, failure.device) == (3, 3, 3)
    assert (failure.iteration, failure.phase) == (40, "backward")
    assert OOM[:40] in path.read_text().splitlines()[failure.line - 1]
    assert failure.frames[0].startswith("/home/alice/Megatron-LM/megatron/core/pipeline_parallel")
    assert len(failure.frames) == 5


def test_one_file_per_rank() -> None:
    """Files named by rank give each rank its own history and failures."""
    result = scan(FIXTURES / "ranks")
    assert sorted(result.history.ranks, key=str) == [0, 1]
    assert [f.rank for f in result.failures if f.kind == "device_oom"] == [1]
    assert list(result.history.ranks[1].reserved) == [52.0 * 2**30, 77.5 * 2**30]


def test_gzip_gives_the_same(tmp_path: Path) -> None:
    """A compressed log reads like the plain one."""
    plain = FIXTURES / "megatron_interleaved.log"
    packed = tmp_path / "a.log.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    a, b = scan(plain), scan(packed)
    assert [(f.kind, f.rank, f.line) for f in a.failures] == [
        (f.kind, f.rank, f.line) for f in b.failures
    ]


def test_torn_gzip_gives_what_is_there(tmp_path: Path) -> None:
    """A cut archive is read up to the cut."""
    data = gzip.compress((FIXTURES / "megatron_interleaved.log").read_bytes(), mtime=0)
    path = tmp_path / "a.gz"
    path.write_bytes(data[: len(data) // 2])
    assert scan(path).files == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig", "latin-1"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    """UTF-16, a byte order mark and other encodings do not hide a failure."""
    path = tmp_path / "a.log"
    path.write_bytes(("größe é\n" + OOM + "\nÄnde\n").encode(encoding))
    failures = scan(path).failures
    assert [(f.kind, f.line) for f in failures] == [("device_oom", 2)]


def test_a_long_line_costs_little_memory(tmp_path: Path) -> None:
    """A line of 40 MB is passed over in bounded memory; what follows is read, with its number."""
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        for _ in range(40):
            file.write(b"x" * 1_000_000)
        file.write(b"\n" + OOM.encode() + b"\n")
    tracemalloc.start()
    failures = scan(path).failures
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(f.kind, f.line) for f in failures] == [("device_oom", 2)]
    assert peak < 16 << 20


def test_error_file_of_torchrun(tmp_path: Path) -> None:
    """The error file of a rank tells its failure, time, and the local rank by its folder."""
    path = tmp_path / "attempt_0" / "5" / "error.json"
    path.parent.mkdir(parents=True)
    stack = "Traceback (most recent call last):\n" + '  File "a.py", line 3, in forward\n    x()\n'
    extra = {"py_callstack": stack + OOM + "\n", "timestamp": "1767323045"}
    path.write_text(json.dumps({"message": {"message": OOM, "extraInfo": extra}}))
    (failure,) = scan(tmp_path).failures
    assert (failure.local_rank, failure.time, failure.phase) == (5, 1767323045.0, "forward")


def test_a_directory_with_other_files(tmp_path: Path) -> None:
    """Images, archives and hidden files of a directory are left out."""
    (tmp_path / "a.log").write_text(OOM + "\n")
    (tmp_path / "plot.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "model.bin").write_bytes(b"\x00" * 4096)
    (tmp_path / "b.log").write_bytes(b"\x00" * 4096)
    (tmp_path / ".hidden").write_text(OOM)
    files, skipped = find_logs([tmp_path])
    assert [Path(file.name).name for file in files] == ["a.log"]
    assert len(skipped) == 4


def test_nothing_to_read(tmp_path: Path) -> None:
    """A directory without logs and a binary file are refused in one line."""
    with pytest.raises(InputError, match="no logs"):
        find_logs([tmp_path])
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG\r\n")
    with pytest.raises(InputError, match="not a log"):
        find_logs([picture])


def test_repetitions_are_one_failure(tmp_path: Path) -> None:
    """The same failure printed twice, once with the rank, is one with both prints' knowledge."""
    path = tmp_path / "a.log"
    path.write_text(f"{OOM}\n[rank2]: {OOM}\n[rank3]: {OOM}\n")
    failures = scan(path).failures
    assert [(f.rank, f.repeats) for f in failures] == [(2, 1), (3, 0)]


def test_lines_are_counted_across_pieces(tmp_path: Path) -> None:
    """Line numbers hold in a log of several pieces, with dense progress lines cut out."""
    line = (
        "[x] iteration {i:8d}/ 99999 | consumed samples: 1 | elapsed time per iteration (ms): 5.0 |"
    )
    rows = [line.format(i=i) for i in range(30_000)]
    rows.insert(20_000, "[rank1]: " + OOM)
    rows.insert(29_000, "[rank2]: " + OOM)
    path = tmp_path / "a.log"
    path.write_text("\n".join(rows) + "\n")
    result = scan(path)
    assert [(f.rank, f.line, f.iteration) for f in result.failures] == [
        (1, 20_001, 19_999),
        (2, 29_001, 28_998),
    ]
    assert result.history.lines == 30_000
    assert result.lines == 30_002


def test_a_flood_of_retries_is_cheap_and_short(tmp_path: Path) -> None:
    """Thousands of recovered retries are one entry a rank, with their number."""
    line = (
        "[rank{r}]:[W812 10:00:00.1 CUDACachingAllocator.cpp:9] memory allocation failed with OOM "
        "on device {r} while trying to allocate {n} bytes (free: 1, total: 2)."
    )
    path = tmp_path / "a.log"
    path.write_text("\n".join(line.format(r=i % 4, n=i) for i in range(2000)) + "\n")
    failures = scan(path).failures
    assert [f.fatal for f in failures] == [False] * 4
    assert sum(1 + f.repeats for f in failures) == 2000


def test_files_of_different_frameworks(tmp_path: Path) -> None:
    """What fills one file does not hide the other lines of the next."""
    line = "iteration {i:8d}/ 99 | elapsed time per iteration (ms): 5.0 |"
    (tmp_path / "a.log").write_text("\n".join(line.format(i=i) for i in range(9)) + "\n")
    (tmp_path / "b.log").write_text(" 10%|#  | 20/200 [00:05<00:45, 2.00it/s]\n")
    formats = scan(tmp_path).history.formats
    assert formats == {"megatron iteration": 9, "progress bar": 1}
