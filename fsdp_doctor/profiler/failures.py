"""Describe an exception of a training process as a failure record."""

from __future__ import annotations

import errno
import re
import time
import traceback
from typing import Any

import torch

from fsdp_doctor.redact import redact_text, short_path

_REQUESTED = re.compile(r"Tried to allocate ([\d.]+) ?(GiB|MiB|KiB|bytes|B)")
_FACTORS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "bytes": 1, "B": 1}
_LONGEST_MESSAGE = 4000
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def describe_failure(error: BaseException, step: int | None, phase: str) -> dict[str, Any]:
    """Return kind, message, step, phase and frames of ``error``, redacted."""
    text = redact_text(f"{type(error).__name__}: {error}")[:_LONGEST_MESSAGE]
    requested = _REQUESTED.search(text)
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    return {
        "kind": _kind(error),
        "message": text,
        "step": step,
        "phase": phase,
        "frames": _frames(error),
        "requested_bytes": round(float(requested[1]) * _FACTORS[requested[2]])
        if out_of_memory and requested
        else None,
        "time": time.time(),
    }


def _kind(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "device_oom"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.errno in _NO_SPACE:
        return "no_space"
    return "exception"


def _frames(error: BaseException) -> list[str]:
    stack = traceback.extract_tb(error.__traceback__)
    return [redact_text(f"{short_path(f.filename)}:{f.lineno} {f.name}") for f in reversed(stack)]
