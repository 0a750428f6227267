"""Decide what a line that may tell of a failure says: all families, in the order of precedence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fsdp_doctor.logs import allocator, device_errors, elastic, host_errors, process_ends
from fsdp_doctor.logs.records import Message

if TYPE_CHECKING:
    from fsdp_doctor.logs.context import Context

_FLUSHES = re.compile(r"(\d+) pytorch allocator cache flushes since last step")
_HOST_USED = re.compile(r"CPU Virtual Memory: +used = ([\d.]+) GB, percent = ([\d.]+)%")
_MIXED = re.compile(
    r"has both parameters with requires_grad=True and False\b.*?"
    r"(?:\((\d+) numel instead of (\d+) numel)"
)
_DECOYS = re.compile(
    r"CUDA OOMs: +\d|cudaMalloc retries|except .*OutOfMemory|^\s*(?:#|raise |if |elif |return )"
    r"|OutOfMemoryError(?: as \w+)?:\s*$|max_split_size_mb to avoid fragmentation\.?\s*$"
    r"|\bTo avoid (?:an? )?(?:OOM|out of memory)|(?:may|might|could|can"
    r"|will) (?:cause|lead|result|run)"
    r"[^\n]{0,40}(?:OOM|out of memory)|(?:avoid|prevent|reduce|handle|catch|in case of|if you)"
    r"[^\n]{0,60}(?:OOM|out of memory|out-of-memory)|oom_score|--oom|OOM[- ](?:safe|guard|check)",
    re.IGNORECASE,
)
_SURE = re.compile(
    r"[Tt]ried to allocate|Traceback|Error: |error: |out of memory\. |Killed process"
)
_SOURCE_LINE = re.compile(r"^\s+(?:\w[\w.]*\(|raise\b|return\b|except\b|assert\b|\w+ = )")
_INCOMPLETE = frozenset({"bare", "malloc-async", "ray", "nccl-warn", "nccl-error", "runtime"})


def note_of(line: str) -> tuple[str, dict[str, float]] | None:
    """Return the name and values of a line that is evidence but no failure."""
    if (found := _FLUSHES.search(line)) is not None:
        return "cache_flushes", {"count": float(found[1][:12])}
    if (found := _HOST_USED.search(line)) is not None:
        return "host_memory", {
            "used_bytes": float(found[1][:20].strip(".") or 0) * 2**30,
            "percent": float(found[2][:8].strip(".") or 0),
        }
    if (found := _MIXED.search(line)) is not None:
        return "mixed_grad_unit", {
            "numel": float(found[1][:20]),
            "trainable_numel": float(found[2][:20]),
        }
    if "find_unused_parameters=True was specified" in line and "did not find any" in line:
        return "unused_flag", {}
    return None


def read_message(line: str, context: Context) -> Message | None:
    """Return the failure that a line tells of, or None (also for decoys).

    Lines that follow are read where the message goes on over them.
    """
    if _DECOYS.search(line) is not None and _SURE.search(line) is None:
        return None
    message = _parse(line)
    if message is None and "error: invalid argument" not in line:
        return None
    if message is None:
        return device_errors.pinned(line, "\n".join(context.frames[:12]))
    if message.form in _INCOMPLETE:
        longer = _parse("\n".join([line, *context.lines_after[:16]]))
        if longer is not None and longer.kind == message.kind and not _is_next(context):
            message = longer
    if message.kind == "driver_oom" and context.frames:
        message = device_errors.pinned(line, "\n".join(context.frames[:8])) or message
    if message.form in ("elastic", "elastic-exit"):
        elastic.complete(message, context.lines_before)
    return message


def _is_next(context: Context) -> bool:
    """Whether the lines after begin a failure of their own that must not lend its numbers."""
    following = "\n".join(context.lines_after[:2])
    return "out of memory. Tried" in following


def _parse(text: str) -> Message | None:
    for parse in (
        allocator.parse,
        device_errors.parse,
        host_errors.parse,
        process_ends.parse,
    ):
        message = parse(text)
        if message is not None:
            return message
    return _bare(text)


_BARE = re.compile(r"\b(?:torch\.(?:cuda\.)?)?OutOfMemoryError\b(?:: |$)")


def _bare(text: str) -> Message | None:
    """An exception of the allocator whose text was cut off."""
    first = text.partition("\n")[0]
    if _SOURCE_LINE.match(first) or _BARE.search(first) is None:
        return None
    return Message(kind="device_oom", form="bare")
