"""What launchers put before a line: rank, host, process, time.

Known: torch (``[rank3]:``), torchrun (``[default3]:``), ``srun -l`` (``3: ``), mpirun
(``[1,3]<stderr>:``), kubectl (``[pod/name/container]``, RFC 3339 times), Ray
(``(Worker pid=1, ip=1.2.3.4)``), DeepSpeed and pdsh (``host: ``), Lightning, Determined
(``[rank=3]``), NCCL (``host:pid:tid [gpu]``), glog (``E0530 23:22:51.028000 74691 ...``).
"""

from __future__ import annotations

import re
from calendar import timegm

from fsdp_doctor.logs.records import Origin

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[(?:[Gg]lobal )?[Rr]ank[ _:=]{0,2}(?P<rank>\d{1,6})\]:?\s?",
        r"[Rr]ank[ _:=]?(?P<rank>\d{1,6})\s?[:|]\s?",
        r"\[(?:default|trainer|worker|role|node|main)_?(?P<local>\d{1,4})\]:?\s?",
        r"\[\d{1,3},(?P<rank>\d{1,6})\]<std(?:err|out)>:?\s?",
        r"\((?P<actor>[^()]{1,120}?)pid=(?P<pid>\d{1,12})(?:, ip=(?P<host>[\w.:-]{1,64}))?\)\s?",
        r"\[pod/(?P<host>[\w.-]{1,120})/[\w.-]{1,120}\]\s?",
        r"\s{0,5}(?P<rank>\d{1,6}):\s",
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z (?:std(?:err|out) [FP] )?",
        r"(?P<host>[A-Za-z][A-Za-z0-9.-]{0,60}\d): (?=\S)",
        r"\[\]\s",
    )
)
_NCCL = re.compile(r"(?P<host>[\w.-]{1,64}):(?P<pid>\d{1,12}):\d{1,12} \[(?P<local>\d{1,4})\]")
_RANK_INSIDE = re.compile(
    r"\[(?:PG [^\]]{0,80}?)?[Rr]ank:? ?(\d{1,6})\]|\bon rank (\d{1,6})\b|\brank=(\d{1,6})\b"
    r"|\[[Rr]ank (\d{1,6})[\]:,]"
)
_TIME = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[ T_](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\b[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{3,9})\s+(\d{1,12})?")
_GLOG_PID = re.compile(r"[IWEF]\d{3,4} \d\d:\d\d:\d\d\.\d+ (\d{2,12}) ")


def split_prefix(line: str, year: int | None = None) -> tuple[Origin, str]:
    """Return who printed a line, and the line without colours and prefixes."""
    if "\x1b" in line:
        line = ANSI.sub("", line)
    origin = Origin()
    for _ in range(4):
        for pattern in _PREFIXES:
            found = pattern.match(line)
            if found is not None:
                _take(origin, found.groupdict())
                origin.time = origin.time or time_in(found[0])
                line = line[found.end() :]
                break
        else:
            break
    nccl = _NCCL.search(line[:300])
    if nccl is not None:
        _take(origin, nccl.groupdict())
    if origin.rank is None and (inside := _RANK_INSIDE.search(line[:2000])) is not None:
        origin.rank = int(next(group for group in inside.groups() if group))
    if origin.time is None:
        origin.time = time_in(line, year)
    if origin.pid is None and (pid := _GLOG_PID.search(line[:80])) is not None:
        origin.pid = int(pid[1])
    return origin, line


def _take(origin: Origin, found: dict[str, str | None]) -> None:
    if found.get("rank") and origin.rank is None:
        origin.rank = int(found["rank"] or 0)
    if found.get("local") and origin.local_rank is None:
        origin.local_rank = int(found["local"] or 0)
    if found.get("pid") and origin.pid is None:
        origin.pid = int(found["pid"] or 0)
    origin.host = origin.host or found.get("host") or None


def time_in(line: str, year: int | None = None) -> float | None:
    """Return the first time in a line; ``year`` for times that do not tell theirs."""
    found = _TIME.search(line[:400])
    if found is not None:
        *parts, fraction = found.groups()
        numbers = [int(part) for part in parts]
    else:
        glog = _GLOG.search(line[:200])
        if glog is None or year is None:
            return None
        numbers = [year, *(int(glog[i]) for i in range(1, 6))]
        fraction = glog[6]
    _, month, day, hour, minute, second = numbers
    if not (1 <= month <= 12 and 1 <= day <= 31 and hour < 24 and minute < 60 and second < 62):
        return None
    return timegm(tuple(numbers)) + (float(f"0.{fraction}") if fraction else 0.0)


def rank_of_head(head: str) -> int | None:
    """Return the rank that a line's beginning tells, fast; for the history."""
    for pattern in _PREFIXES[:2]:
        found = pattern.match(head)
        if found is not None:
            return int(found["rank"])
    found = _PREFIXES[3].match(head) or _PREFIXES[6].match(head)
    return int(found["rank"]) if found is not None else None
