"""Read the memory counters of a device without synchronising it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_doctor.model.memory import MemoryCounters

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STATM = Path("/proc/self/statm")


def host_rss_bytes() -> int | None:
    """Return this process's resident set size, or None where /proc does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorState:
    """Counters of the caching allocator at one moment."""

    end: MemoryCounters
    peak: MemoryCounters
    """Since the last ``reset_peak``."""
    allocation_retries: int | None
    out_of_memory_count: int | None


class NoCounters:
    """A device whose allocator counts nothing (CPU)."""

    def read(self) -> AllocatorState:
        """Return unknown counters."""
        return AllocatorState(
            end=MemoryCounters(),
            peak=MemoryCounters(),
            allocation_retries=None,
            out_of_memory_count=None,
        )

    def reset_peak(self) -> None:
        """Do nothing."""

    def device_used_bytes(self) -> int | None:
        """Return None."""
        return None


class CudaCounters:
    """``torch.cuda`` caching-allocator counters (host-side: no synchronisation)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> AllocatorState:
        """Return current values and peaks."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return AllocatorState(
            end=_counters(stats, "current"),
            peak=_counters(stats, "peak"),
            allocation_retries=stats.get("num_alloc_retries"),
            out_of_memory_count=stats.get("num_ooms"),
        )

    def reset_peak(self) -> None:
        """Start peaks anew from the current values."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def device_used_bytes(self) -> int | None:
        """Return used memory of the whole device, all processes (``cudaMemGetInfo``)."""
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)


def _counters(stats: dict[str, Any], which: str) -> MemoryCounters:
    def value(name: str) -> int | None:
        found: int | None = stats.get(name, {}).get("all", {}).get(which)
        return found

    return MemoryCounters(
        allocated_bytes=value("allocated_bytes"),
        reserved_bytes=value("reserved_bytes"),
        active_bytes=value("active_bytes"),
        requested_bytes=value("requested_bytes"),
    )


def make_counters(device: torch.device) -> CudaCounters | NoCounters:
    """Return the counters of ``device``."""
    return CudaCounters(device) if device.type == "cuda" else NoCounters()
