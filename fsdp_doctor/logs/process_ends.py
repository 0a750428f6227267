"""How launchers and peers report that a process ended: exit codes, signals, time-outs.

Wordings: torch/distributed/elastic/multiprocessing (api.py, errors/__init__.py), ProcessGroupNCCL
and TCPStore (torch 1.8 to 2.14), deepspeed/launcher/launch.py, srun, bash. A killed process may or
may not have been killed for memory; the diagnosis weighs that.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fsdp_doctor.logs.records import Message

_ELASTIC = re.compile(
    r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)"
    r"|exitcode\s*: (-?\d+)\s*\(pid: (\d+)\)"
)
_SIGNAL9 = re.compile(r"Signal 9 \(SIGKILL\) received by PID (\d+)")
_DEEPSPEED = re.compile(
    r"exits? with return code = (-?\d+)|Killing subprocess (\d+)|Process (\d+) exits with"
)
_EXIT = re.compile(
    r"(?:exit(?:ed)?(?: with)?(?: exit)? code:?|Exit Code:|exit status|exitcode:?|code=)"
    r" ?(137|-9)\b"
)
_SRUN_KILL = re.compile(r"srun: error: (\S+): tasks? ([\d,\-\[\]]+): Killed")
_SHELL = re.compile(r"^\S*(?::? line \d+:)?\s*(\d+)?\s*Killed(?:\s{2,}.*)?$")
_VICTIM = re.compile(
    r"Watchdog caught collective operation timeout|Some NCCL operations have failed or timed out"
    r"|Sending process \d+ closing signal SIGTERM|Received Signals\.SIGTERM|got signal: 15"
    r"|Connection reset by peer|Broken ?[Pp]ipe|Connection closed by (?:remote )?peer"
    r"|remote process exited or there was a network error|ncclRemoteError"
    r"|Signal 15 \(SIGTERM\) received|Received SIGTERM: 15|Timed out waiting"
    r"|To avoid data inconsistency, we are taking the entire process down"
    r"|failed to recv, got 0 bytes|recvValue failed|NCCL communicator was aborted",
    re.IGNORECASE,
)
_RANK = re.compile(r"\[(?:[^\]]{0,80}?)[Rr]ank:? ?(\d+)\]|\bRank (\d+)\b")
_PID = re.compile(r"Sending process (\d+) closing|PID:? (\d+)")


def parse(text: str) -> Message | None:
    """Return how a process ended according to the line ``text``, or None."""
    for reader in (_elastic, _deepspeed, _killed, _victim):
        message = reader(text)
        if message is not None:
            return message
    return None


def _ended(code: int, form: str) -> Message:
    """An exit code: -9 and 137 are SIGKILL, -15 the launcher's SIGTERM, others say nothing."""
    if code in (-9, 137):
        return Message(kind="host_oom_kill", form=form, exit_code=code)
    if code in (-7, 135):
        return Message(kind="shared_memory", form=form, exit_code=code)
    return Message(
        kind="not_memory", form=f"{form}-exit", exit_code=code, victim=code in (-15, 143)
    )


def _elastic(text: str) -> Message | None:
    found = _ELASTIC.search(text)
    if found is not None:
        message = _ended(int((found[1] or found[4])[:6]), "elastic")
        message.local_rank = int(found[2][:6]) if found[2] else None
        message.pid = int((found[3] or found[5])[:18])
        return message
    killed = _SIGNAL9.search(text)
    if killed is None:
        return None
    return Message(kind="host_oom_kill", form="elastic", exit_code=-9, pid=int(killed[1][:18]))


def _deepspeed(text: str) -> Message | None:
    found = _DEEPSPEED.search(text)
    if found is None:
        return None
    if found[1] is not None:
        return _ended(int(found[1][:6]), "deepspeed")
    pid = int((found[2] or found[3])[:18])
    return Message(kind="not_memory", form="deepspeed-kill", pid=pid, victim=True)


def _killed(text: str) -> Message | None:
    task = _SRUN_KILL.search(text)
    if task is not None:
        rank = int(task[2]) if task[2].isdigit() and len(task[2]) < 8 else None
        return Message(kind="host_oom_kill", form="srun-killed", host=task[1], rank=rank)
    code = _EXIT.search(text)
    if code is not None:
        return _ended(int(code[1]), "exit-code")
    shell = _SHELL.match(text.strip())
    if shell is None:
        return None
    pid = int(shell[1][:18]) if shell[1] else None
    return Message(kind="host_oom_kill", form="shell-killed", exit_code=-9, pid=pid)


def _victim(text: str) -> Message | None:
    if _VICTIM.search(text) is None:
        return None
    form = "nccl-timeout" if re.search(r"watchdog|timed out|timeout", text, re.I) else "peer-gone"
    if "SIGTERM" in text or "signal: 15" in text:
        form = "sigterm"
    message = Message(kind="not_memory", form=form, victim=True)
    rank = _RANK.search(text)
    if rank is not None:
        message.rank = int((rank[1] or rank[2])[:8])
    pid = _PID.search(text)
    message.pid = int((pid[1] or pid[2])[:18]) if pid else None
    return message


Reader = Callable[[str], Message | None]
