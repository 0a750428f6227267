"""``PYTORCH_CUDA_ALLOC_CONF`` as text, read as torch does (``CUDAAllocatorConfig.cpp`` and, from
2.9 on, ``AcceleratorAllocatorConfig.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fsdp_doctor.errors import InputError
from fsdp_doctor.memory.caching_allocator import LARGE_SEGMENT, AllocatorSettings

_MIB = 1 << 20
_ELSEWHERE = frozenset(
    {
        "release_lock_on_cudamalloc",
        "pinned_use_cuda_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_reserve_segment_size_mb",
        "graph_capture_record_stream_reuse",
    }
)
"""Options that do not change what is reserved on the GPU."""


def parse_alloc_conf(text: str, where: str = "--alloc-conf") -> AllocatorSettings:
    """Return the settings that ``text`` asks for, as ``max_split_size_mb:256,...``.

    Raises InputError for an option that is unknown, wrong or not modelled.
    """
    settings = AllocatorSettings()
    for key, value in _pairs(text, where):
        if key in _ELSEWHERE:
            continue
        read = _READ.get(key)
        if read is None:
            known = ", ".join(_READ)
            raise InputError(f"{key!r} is not modelled", where=where, hint=f"one of: {known}")
        try:
            settings = replace(settings, **read(value))
        except ValueError as error:
            raise InputError(f"{key}:{value}: {error}", where=where) from None
    return settings


def _pairs(text: str, where: str) -> Iterator[tuple[str, str]]:
    for part in text.split(","):
        if not part.strip():
            continue
        key, colon, value = (piece.strip() for piece in part.partition(":"))
        if not colon or not value:
            raise InputError(f"{part.strip()!r} has no value", where=where, hint="KEY:VALUE,...")
        yield key, value


def _max_split(value: str) -> dict[str, Any]:
    size = int(value) * _MIB
    if size <= LARGE_SEGMENT:
        raise ValueError(f"torch takes more than {LARGE_SEGMENT // _MIB}")
    return {"max_split_size_bytes": size}


def _divisions(value: str) -> dict[str, Any]:
    if value.startswith("["):
        raise ValueError("only one number for all sizes is modelled")
    number = int(value)
    if number < 0 or number & (number - 1):
        raise ValueError("torch takes powers of two")
    return {"roundup_power2_divisions": number}


def _threshold(value: str) -> dict[str, Any]:
    number = float(value)
    if not 0 < number < 1:
        raise ValueError("torch takes a number between 0 and 1")
    return {"garbage_collection_threshold": number}


def _expandable(value: str) -> dict[str, Any]:
    if value not in ("True", "False"):
        raise ValueError("torch takes True or False")
    return {"expandable_segments": value == "True"}


def _backend(value: str) -> dict[str, Any]:
    if value != "native":
        raise ValueError("only the native backend is modelled")
    return {}


_READ: dict[str, Callable[[str], dict[str, Any]]] = {
    "expandable_segments": _expandable,
    "max_split_size_mb": _max_split,
    "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": _threshold,
    "backend": _backend,
}
