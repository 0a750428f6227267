"""GPUs by name: memory that CUDA reports and the cuBLAS workspace their library takes."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_doctor.errors import InputError

GIB = 1 << 30
_HOPPER_WORKSPACE = 32 << 20
_OLDER_WORKSPACE = 8320 << 10


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What an estimate needs to know of a GPU."""

    name: str
    memory_bytes: int
    """Total memory as the driver reports it: less than the number in the name."""
    cublas_workspace_bytes: int
    """Of each thread and stream that multiplies (``CublasHandlePool.cpp``)."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuModel("h200", int(139.80 * GIB), _HOPPER_WORKSPACE),
        GpuModel("h100", int(79.10 * GIB), _HOPPER_WORKSPACE),
        GpuModel("b200", int(178.35 * GIB), _HOPPER_WORKSPACE),
        GpuModel("a100-80", int(79.15 * GIB), _OLDER_WORKSPACE),
        GpuModel("a100-40", int(39.39 * GIB), _OLDER_WORKSPACE),
        GpuModel("v100-32", int(31.73 * GIB), _OLDER_WORKSPACE),
        GpuModel("t4", int(14.58 * GIB), _OLDER_WORKSPACE),
    )
}
"""Totals as out-of-memory messages of these GPUs name them; they differ a little by board and
driver (``--memory`` overrides them). Workspaces: 32 MiB from Hopper on, 8320 KiB before."""


def find_gpu(name: str) -> GpuModel:
    """Return the GPU called ``name``. Raises InputError, which lists the names."""
    key = name.strip().lower().removeprefix("nvidia").strip(" -").replace(" ", "-")
    gpu = GPUS.get(key) or GPUS.get({"a100": "a100-80", "v100": "v100-32"}.get(key, ""))
    if gpu is None:
        raise InputError(f"unknown GPU {name!r}", where="--gpu", hint=f"one of: {', '.join(GPUS)}")
    return gpu
