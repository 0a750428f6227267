"""torchrun's error files and the table of root causes.

torch/distributed/elastic/multiprocessing/errors/__init__.py (torch 1.9 to 2.14): ``error.json`` is
``{"message": {"message", "extraInfo": {"py_callstack", "timestamp"}}}`` or ``{"message": text}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from time import gmtime, strftime
from typing import Any

from fsdp_doctor.logs.prefix import time_in
from fsdp_doctor.logs.records import Message

_RANK = re.compile(r"^\s*rank\s*: (\d{1,7})(?: \(local_rank: (\d{1,5})\))?")
_HOST = re.compile(r"^\s*host\s*: (\S{1,200})")
_TIME = re.compile(r"^\s*time\s*: (\S{1,60})")
_TABLE_LINES = 5


def error_file_text(data: bytes) -> bytes | None:
    """Return what a torchrun error file says as lines of a log, or None when it is none."""
    try:
        content = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or "message" not in content:
        return None
    message: Any = content["message"]
    lines: list[str] = []
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        if isinstance(extra, dict):
            lines += _moment(extra.get("timestamp"))
            lines += str(extra.get("py_callstack") or "").splitlines()[-400:]
        message = message.get("message")
    last = str(message or "")
    if lines and last and any(last[:80] in line for line in lines[-3:]):
        last = ""
    return ("\n".join([*lines, last]) + "\n").encode("utf-8", "replace")


def _moment(value: Any) -> list[str]:
    try:
        return [strftime("%Y-%m-%d %H:%M:%S", gmtime(int(value)))]
    except (TypeError, ValueError, OverflowError, OSError):
        return []


def complete(message: Message, lines_before: Sequence[str]) -> None:
    """Take rank, host and time from the lines of the table above an exit code."""
    for line in lines_before[-_TABLE_LINES:]:
        if (rank := _RANK.match(line)) is not None:
            message.rank = int(rank[1])
            if rank[2] is not None:
                message.local_rank = int(rank[2])
        elif (host := _HOST.match(line)) is not None:
            message.host = host[1]
        elif (time := _TIME.match(line)) is not None:
            message.time = time_in(time[1])
