"""Failures to get host memory: CPU allocator, shared memory, the OOM killers.

Wordings: c10/core/impl/alloc_cpu.cpp, torch/utils/data/dataloader.py and _utils/signal_handling.py,
ATen/MapAllocator.cpp (torch 1.0 to 2.14); numpy's _ArrayMemoryError; mm/oom_kill.c and memcontrol.c
of Linux 4 to 6; slurmstepd and srun 17 to 24; Ray 2's memory monitor; kubelet's OOMKilled.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fsdp_doctor.logs.records import Message
from fsdp_doctor.logs.sizes import SIZE, sane, size_bytes

_CPU = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory|out of memory)"
    r"(?:: you tried to allocate (\d+) bytes)?"
)
_NUMPY = re.compile(rf"Unable to allocate {SIZE} for an array")
_CANNOT = re.compile(r"Cannot allocate memory|std::bad_alloc|\bMemoryError\b")
_MAP = re.compile(r"unable to mmap (\d+) bytes")
_SHARED = re.compile(
    r"insufficient shared memory|out of shared memory|[Bb]us error|unable to open shared memory"
    r"|unable to write to file </torch_|No space left on device[^\n]{0,80}/dev/shm"
    r"|/dev/shm[^\n]{0,160}No space left on device|unable to allocate shared memory(?:\(shm\))?"
    r"|Error while creating shared memory segment|Failed to (?:create|extend) /dev/shm"
    r"|unable to resize file </torch_"
)
_SHARED_SIZE = re.compile(r"\(size (\d+)\)|to (\d+) bytes|(\d+) bytes")
_LOADER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (\d+)[^)]*\) (?:is killed by signal: Killed|"
    r"exited unexpectedly with exit code -?9)"
)
_KERNEL = re.compile(
    r"(?:Out of memory|out of memory): (?:Killed|Kill) process (\d+)|oom-kill:constraint=|"
    r"invoked oom-killer|oom_reaper: reaped process (\d+)"
)
_KERNEL_SIZE = re.compile(r"anon-rss:(\d+)kB")
_SLURM = re.compile(
    r"slurmstepd: error: .{0,40}?(?:Detected|oom|OOM)\D{0,40}(\d+)? ?oom[-_]kill|"
    r"Detected (\d+) oom[-_]kill|Exceeded (?:job|step) memory limit|\bOUT_OF_MEMORY\b"
)
_SRUN = re.compile(r"srun: error: (\S+): tasks? ([\d,\-\[\]]+): Out Of Memory")
_KUBERNETES = re.compile(r"\bOOMKilled\b|Container .{0,80}exceeded its memory limit|OOMKilling")
_RAY_KILL = re.compile(
    r"node running low on memory|Workers \(tasks / actors\) killed due to memory pressure"
    r"|killed due to the node running|RayOutOfMemoryError"
)
_RAY_NODE = re.compile(
    r"was ([\d.]+)\s*GB / ([\d.]+)\s*GB \(([\d.]+)\),? which exceeds the memory usage threshold"
)
_RAY_VICTIM = re.compile(r"pid=(\d+), memory used=([\d.]+)\s*GB")
_RAY_USER = re.compile(r"^\s*(\d+)\s+([\d.]+)\s+(\S.*)$", re.MULTILINE)
_RAY_HOST = re.compile(r"\(IP: ([\w.:-]+),")


def parse(text: str) -> Message | None:
    """Return the failure that ``text`` tells of, or None."""
    for reader in _READERS:
        message = reader(text)
        if message is not None:
            return message
    return None


def _cpu(text: str) -> Message | None:
    found = _CPU.search(text)
    if found is not None:
        size = sane(int(found[1][:30])) if found[1] else None
        return Message(kind="host_alloc", form="cpu-allocator", requested_bytes=size, backend="CPU")
    array = _NUMPY.search(text)
    if array is not None:
        size = sane(size_bytes(array[1], array[2]))
        return Message(kind="host_alloc", form="numpy", requested_bytes=size, backend="CPU")
    return None


def _shared(text: str) -> Message | None:
    found = _SHARED.search(text)
    if found is None:
        return None
    message = Message(kind="shared_memory", form="dev-shm")
    size = _SHARED_SIZE.search(text[found.start() : found.end() + 200])
    if size is not None and "shared memory seg" in text:
        message.requested_bytes = sane(int(next(group for group in size.groups() if group)[:30]))
    worker = re.search(r"worker \(pid (\d+)\)", text)
    message.pid = int(worker[1][:18]) if worker else None
    return message


def _loader(text: str) -> Message | None:
    found = _LOADER.search(text)
    if found is None:
        return None
    pid = int(found[1][:18])
    return Message(kind="host_oom_kill", form="dataloader-worker", pid=pid, exit_code=-9)


def _kernel(text: str) -> Message | None:
    found = _KERNEL.search(text)
    if found is None:
        return None
    form = "cgroup" if re.search(r"[Mm]emory cgroup|CONSTRAINT_MEMCG", text) else "kernel"
    message = Message(kind="host_oom_kill", form=form)
    pid = found[1] or found[2]
    message.pid = int(pid[:18]) if pid else None
    size = _KERNEL_SIZE.search(text)
    message.process_bytes = sane(int(size[1][:20]) * 1024) if size else None
    return message


def _slurm(text: str) -> Message | None:
    task = _SRUN.search(text)
    if task is not None:
        rank = int(task[2]) if task[2].isdigit() and len(task[2]) < 8 else None
        return Message(kind="host_oom_kill", form="srun", host=task[1], rank=rank)
    found = _SLURM.search(text)
    if found is None:
        return None
    count = found[1] or found[2]
    return Message(
        kind="host_oom_kill", form="slurm", count=int(count) if count and len(count) < 9 else None
    )


def _ray(text: str) -> Message | None:
    if _RAY_KILL.search(text) is None and _RAY_NODE.search(text) is None:
        return None
    message = Message(kind="host_oom_kill", form="ray")
    joined = re.sub(r"(?<=[\d.])\n(?=GB)|\n(?=emory)", "", text)
    node = _RAY_NODE.search(joined)
    if node is not None:
        used, total = (size_bytes(number.strip("."), "GB") for number in (node[1], node[2]))
        message.total_bytes = sane(total)
        message.allocated_bytes = sane(used)
    victim = _RAY_VICTIM.search(joined)
    if victim is not None:
        message.pid = int(victim[1][:18])
        message.process_bytes = sane(size_bytes(victim[2].strip("."), "GB"))
    host = _RAY_HOST.search(joined)
    message.host = host[1] if host else None
    table = joined.partition("MEM(GB)")[2]
    message.processes = [
        (int(pid[:18]), size_bytes(number.strip(".") or "0", "GB"))
        for pid, number, _ in _RAY_USER.findall(table)[:16]
    ]
    return message


def _kubernetes(text: str) -> Message | None:
    if _KUBERNETES.search(text) is None:
        return None
    return Message(kind="host_oom_kill", form="kubernetes", exit_code=137)


def _plain(text: str) -> Message | None:
    mapped = _MAP.search(text)
    if mapped is not None:
        return Message(kind="host_alloc", form="mmap", requested_bytes=sane(int(mapped[1][:30])))
    found = _CANNOT.search(text)
    if found is None or "OutOfMemoryError" in text:
        return None
    if re.search(r"fork|No such file", text):
        return Message(kind="host_alloc", form="fork")
    return Message(kind="host_alloc", form="errno-12")


_READERS: tuple[Callable[[str], Message | None], ...] = (
    _cpu,
    _shared,
    _loader,
    _kernel,
    _slurm,
    _ray,
    _kubernetes,
    _plain,
)
