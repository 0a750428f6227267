"""Watching every allocation of a training process, from before the model exists."""

from __future__ import annotations

import torch

from fsdp_doctor.profiler.observe.protocol import Observer


def make_observer(device: torch.device) -> Observer:
    """Return the observer for ``device``: the allocator's history on CUDA, else a dispatch mode."""
    if device.type == "cuda":
        from fsdp_doctor.profiler.observe.cuda_history import CudaHistoryObserver

        return CudaHistoryObserver(device)
    from fsdp_doctor.profiler.observe.cpu_tracker import CpuObserver

    return CpuObserver(device)


__all__ = ["Observer", "make_observer"]
