"""Messages of PyTorch's caching allocators: CUDA, HIP, XPU, NPU, MPS and cudaMallocAsync.

Wordings read in the sources of torch 1.0 to 2.14: c10/cuda/CUDACachingAllocator.cpp (hipified for
HIP), c10/cuda/CUDAMallocAsyncAllocator.cpp, c10/xpu/XPUCachingAllocator.cpp,
aten/src/ATen/mps/MPSAllocator.mm; torch_npu's NPUCachingAllocator.cpp. Parts may be missing, zero
or cut; a part that is not there is None.

The size asked for is that of the segment: requests up to 1 MiB print 2 MiB, up to 10 MiB 20 MiB.
"""

from __future__ import annotations

import re

from fsdp_doctor.logs.records import Message
from fsdp_doctor.logs.sizes import SIZE, sane, size_bytes

_HEAD = re.compile(r"\b(CUDA|HIP|XPU|NPU|MUSA|MLU|GCU|HPU) out of memory\b")
_MPS = re.compile(r"MPS backend out of memory")
_ASYNC = re.compile(r"Allocation on device(?: (\d+) would exceed allowed memory)?")
_BOGUS = re.compile(r"Tried to allocate more than 1EB")
_PREEMPTED = re.compile(rf"preemptively rejected\b.*?Requested size: {SIZE}", re.DOTALL)
_RECOVERED = re.compile(
    r"(?:memory mapping|memory allocation|virtual address reservation) failed with OOM on device "
    r"(\d+) while trying to (?:map|allocate|reserve) (\d+) bytes"
    r"(?: \(free: (\d+), total: (\d+)\))?"
)
_REJECTING = re.compile(r"Preemptively rejecting allocation: requested (\d+)")
_SWALLOWED = re.compile(r"UserWarning: Failed to clone\(\) tensor")

_PARTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern.replace("SIZE", SIZE)))
    for name, pattern in (
        ("requested_bytes", r"[Tt]ried to allocate SIZE"),
        ("total_bytes", r"total capac(?:i)?ty of SIZE"),
        ("total_bytes", r"SIZE total capac(?:i)?ty"),
        ("free_bytes", r"of which SIZE is free"),
        ("free_bytes", r"SIZE free\b"),
        ("process_bytes", r"this process has SIZE memory in use"),
        ("limit_bytes", r"SIZE allowed\b"),
        ("limit_bytes", r"max allowed: SIZE"),
        ("allocated_bytes", r"SIZE is allocated by PyTorch"),
        ("allocated_bytes", r"SIZE already allocated"),
        ("allocated_bytes", r"MPS allocated: SIZE"),
        ("private_pool_bytes", r"with SIZE allocated in private pools"),
        ("reserved_unallocated_bytes", r"SIZE is reserved by PyTorch but unallocated"),
        ("reserved_unallocated_bytes", r"SIZE cached\b"),
        ("reserved_bytes", r"SIZE reserved in total"),
    )
)
_PROCESS = re.compile(rf"\bProcess (\d+) has {SIZE} memory in use")
_DEVICE = re.compile(r"\b(?:GPU|NPU|XPU|MUSA|device)\s{1,2}(\d+)[ ;]")
_ASYNC_PARTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(rf"{label}\s*: {SIZE}"))
    for name, label in (
        ("allocated_bytes", "Currently allocated"),
        ("requested_bytes", "Requested"),
        ("total_bytes", "Device limit"),
        ("free_bytes", r"Free \(according to CUDA\)"),
        ("limit_bytes", r"memory fraction\)"),
    )
)


def parse(text: str) -> Message | None:
    """Return what an allocator's message says, or None when ``text`` holds none.

    ``text`` may go on over the following lines of the log.
    """
    if (recovered := _RECOVERED.search(text)) is not None:
        return _recovered(recovered)
    head = _HEAD.search(text)
    if head is not None:
        return _allocator(text[head.start() :], head[1], swallowed=bool(_SWALLOWED.search(text)))
    if (mps := _MPS.search(text)) is not None:
        return _with_parts(_message("mps", "MPS"), text[mps.start() :])
    if (rejecting := _REJECTING.search(text)) is not None:
        message = _message("preempted-warning", "CUDA")
        message.fatal = False
        message.requested_bytes = sane(int(rejecting[1][:30]))
        return message
    found = _ASYNC.search(text)
    if found is not None and (found[1] is not None or "OutOfMemoryError" in text):
        return _asynchronous(text[found.start() :], found[1])
    return None


def _message(form: str, backend: str) -> Message:
    return Message(kind="device_oom", form=form, backend=backend)


def _recovered(found: re.Match[str]) -> Message:
    """A retry after which the allocation may have succeeded (LOG(WARNING), torch 2.13)."""
    message = _message("recovered-retry", "CUDA")
    message.fatal = False
    message.device = _index(found[1])
    message.requested_bytes = sane(int(found[2][:30]))
    message.free_bytes = sane(int(found[3][:30])) if found[3] else None
    message.total_bytes = sane(int(found[4][:30])) if found[4] else None
    return message


def _allocator(text: str, backend: str, *, swallowed: bool) -> Message:
    if _BOGUS.search(text[:200]):
        return Message(kind="not_memory", form="bogus-size", backend=backend)
    message = _with_parts(_message(_form(text), backend), text)
    if (preempted := _PREEMPTED.search(text[:300])) is not None:
        message.form = "preempted"
        message.requested_bytes = size_bytes(preempted[1], preempted[2])
    message.fatal = not swallowed
    return message


def _form(text: str) -> str:
    """Name the wording: by what stands in it, not by the version."""
    if "total capac" not in text:
        return "bare"
    if "has a total capac" in text:
        return "new"
    return "oldest" if " cached)" in text else "old"


def _with_parts(message: Message, text: str) -> Message:
    for name, pattern in _PARTS:
        found = pattern.search(text)
        if found is not None and getattr(message, name) is None:
            setattr(message, name, sane(size_bytes(found[1], found[2])))
    device = _DEVICE.search(text[:400])
    message.device = _index(device[1]) if device else None
    message.processes = [
        (int(pid[:18]), size)
        for pid, number, unit in _PROCESS.findall(text)
        if (size := sane(size_bytes(number, unit))) is not None
    ]
    derive(message)
    return message


def derive(message: Message) -> None:
    """Fill what follows from other numbers: pool total or idle part, share of other processes."""
    allocated, idle, reserved = (
        message.allocated_bytes,
        message.reserved_unallocated_bytes,
        message.reserved_bytes,
    )
    if allocated is not None and idle is not None and reserved is None:
        message.reserved_bytes = allocated + idle
    elif allocated is not None and reserved is not None and idle is None:
        message.reserved_unallocated_bytes = max(reserved - allocated, 0)
    if message.process_bytes == 0:  # WSL and some containers print "0 bytes": not known
        message.process_bytes = None
    known = (message.total_bytes, message.free_bytes, message.process_bytes)
    if message.process_bytes is not None and None not in known:
        total, free, own = (value or 0 for value in known)
        message.other_processes_bytes = max(total - free - own, 0)


def _asynchronous(text: str, device: str | None) -> Message:
    message = _message("malloc-async", "CUDA")
    message.device = _index(device) if device else None
    for name, pattern in _ASYNC_PARTS:
        found = pattern.search(text)
        if found is not None:
            setattr(message, name, sane(size_bytes(found[1], found[2])))
    return message


def _index(text: str) -> int | None:
    return int(text) if len(text) < 6 else None


def fragmentation(message: Message) -> str:
    """Say whether the idle part of the pool would have been enough.

    yes: idle >= request and >= 3 % of the device or 10 % of what the process may reserve (the usual
    waste weighs more in a small pool); minor: idle >= request but less than that; combined: free +
    idle >= request, neither alone; partial: idle at least half of the request; no; unknown when a
    number is missing.
    """
    idle, request = message.reserved_unallocated_bytes, message.requested_bytes
    if idle is None or request is None:
        return "unknown"
    large = message.total_bytes is not None and idle >= 0.03 * message.total_bytes
    large = large or (message.limit_bytes is not None and idle >= 0.1 * message.limit_bytes)
    if idle >= request > 0:
        return "yes" if large or message.total_bytes is None else "minor"
    if not large:
        return "no"
    free = message.free_bytes or 0
    if free < request <= free + idle:
        return "combined"
    return "partial" if 2 * idle >= request else "no"
