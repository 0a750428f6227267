"""Why a run did not complete: the first failure of all ranks, and who only followed."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_doctor.model.memory import Phase
from fsdp_doctor.model.run import Failure
from fsdp_doctor.redact import short_path
from fsdp_doctor.runs.files import read_records
from fsdp_doctor.runs.heartbeat import Heartbeat, read_heartbeat

_FOLLOWS = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|gloo[/\\]transport|"
    r"watchdog|ncclRemoteError|remote process exited|heartbeat monitor|Timed out waiting",
    re.IGNORECASE,
)
"""Messages of ranks that lost a peer. NCCL's failures of its own (out of memory, invalid usage) are
not among them."""
_STOPPED, _LOST_PEER, _OWN_CAUSE = 2, 1, 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ending:
    """How one rank ended badly."""

    rank: int
    time: float
    order: int
    """_OWN_CAUSE before _LOST_PEER before _STOPPED (killed by this tool)."""
    failure: Failure


def first_failure(directory: Path, ranks: Sequence[int]) -> Failure | None:
    """Return the failure that came first and had a cause of its own, or None when none is known.

    A rank that lost its peer is a victim, whatever the clock says; among the others the earliest
    counts.
    """
    endings = [e for rank in ranks if (e := _ending(directory, rank)) is not None]
    if not endings:
        return None
    first = min(endings, key=lambda ending: (ending.order, ending.time))
    victims = tuple(e.rank for e in endings if e.rank != first.rank)
    return replace(first.failure, victims=victims)


def hang_failure(
    directory: Path, hung: Sequence[int], beats: Sequence[tuple[int, Heartbeat]], limit_s: float
) -> Failure:
    """Describe a hang: the suspect is a rank that is not itself waiting in a collective."""
    stacks = {rank: read_stack(directory, rank) for rank, _ in beats}
    working = [rank for rank in hung if not _waits_for_others(stacks.get(rank, ()))]
    by_rank = dict(beats)
    suspect = min(working or hung, key=lambda r: (by_rank[r].step, by_rank[r].since))
    beat = by_rank[suspect]
    return Failure(
        kind="hang",
        message=f"rank {suspect} stayed in {beat.phase} for more than {limit_s:g} s"
        + ("" if working else "; every rank waits in a collective"),
        rank=suspect,
        step=beat.step,
        phase=Phase(beat.phase),
        frames=stacks.get(suspect, ()),
        victims=tuple(rank for rank, _ in beats if rank != suspect),
    )


def _waits_for_others(frames: Sequence[str]) -> bool:
    return any(
        "torch/distributed/" in frame or "torch/autograd/graph.py" in frame for frame in frames[:3]
    )


def read_stack(directory: Path, rank: int) -> tuple[str, ...]:
    """Return the frames of the main thread from a rank's stack dump, innermost first."""
    try:
        text = (directory / f"rank-{rank:05d}.stack").read_text(errors="replace")
    except OSError:
        return ()
    main_thread = text.rpartition("Current thread")[2] if "Current thread" in text else text
    found = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main_thread)
    return tuple(f"{short_path(file)}:{line} {name}" for file, line, name in found)


def _ending(directory: Path, rank: int) -> _Ending | None:
    records = read_records(directory, rank)
    failure = next((r for r in records if r["record"] == "failure"), None)
    ended = next((r for r in records if r["record"] == "exit"), None)
    beat = read_heartbeat(directory, rank)
    if failure is not None:
        return _from_exception(rank, failure)
    if ended is None or ended.get("exit_code") == 0:
        return None
    return _from_exit(rank, ended, beat)


def _from_exception(rank: int, record: dict[str, Any]) -> _Ending:
    message = str(record.get("message", ""))
    failure = Failure(
        kind=str(record.get("kind", "exception")),
        message=message,
        rank=rank,
        step=record.get("step"),
        phase=Phase(record.get("phase", "unknown")),
        frames=tuple(record.get("frames") or ()),
        requested_bytes=record.get("requested_bytes"),
    )
    order = _LOST_PEER if _FOLLOWS.search(message) else _OWN_CAUSE
    return _Ending(rank=rank, time=float(record["time"]), order=order, failure=failure)


def _from_exit(rank: int, record: dict[str, Any], beat: Heartbeat | None) -> _Ending:
    number = record.get("signal")
    if number:
        message = f"killed by signal {number} ({signal.Signals(number).name})"
        if number == signal.SIGKILL:
            message += "; if nobody sent it, the host ran out of memory: see dmesg"
    else:
        message = f"ended with exit code {record.get('exit_code')} before its work was done"
    failure = Failure(
        kind="signal" if number else "exit",
        message=message,
        rank=rank,
        step=beat.step if beat else None,
        phase=Phase(beat.phase) if beat else None,
        signal=number,
        exit_code=record.get("exit_code"),
    )
    order = _STOPPED if record.get("stopped") else _OWN_CAUSE
    return _Ending(rank=rank, time=float(record["time"]), order=order, failure=failure)
