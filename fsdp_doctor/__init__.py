"""fsdp-doctor: why a distributed training job ran out of memory or got slower.

Public API: ``record`` (see ``fsdp_doctor.profiler.recording``), loaded on first use so that
importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fsdp_doctor.profiler.recording import record

__all__ = ["__version__", "record"]


def __getattr__(name: str) -> Any:
    if name == "record":
        from fsdp_doctor.profiler.recording import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
