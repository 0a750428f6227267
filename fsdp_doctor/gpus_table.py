"""GPUs by name: memory that CUDA reports, cuBLAS workspaces, peak rates with their sources."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fsdp_doctor.errors import InputError

GIB = 1 << 30
HOPPER_WORKSPACE = 32 << 20
"""Bytes of cuBLAS's workspace from Hopper on."""
_OLDER_WORKSPACE = 8320 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeed:
    """Peak rates of a GPU and its links. Of none of them is said that a job reaches it."""

    half_flops: float
    """FLOP/s of dense bfloat16 or float16 matrix products."""
    float32_flops: float
    """FLOP/s in float32 without TF32, which torch leaves off."""
    memory_bytes_per_s: float
    l2_bytes: int
    nvlink_bytes_per_s: float
    """In one direction, to all peers of the host together; 0: none."""
    pcie_bytes_per_s: float
    """In one direction."""
    network_bytes_per_s: float
    """Of one GPU's share of its host's network."""
    source: str
    bfloat16: bool = True
    """Whether matrix units take bfloat16; else it runs at float32's rate."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What an estimate needs to know of a GPU."""

    name: str
    memory_bytes: int
    """Total memory as the driver reports it: less than the number in the name."""
    cublas_workspace_bytes: int
    """Of each thread and stream that multiplies (``CublasHandlePool.cpp``)."""
    speed: GpuSpeed


_MIB = 1 << 20
_H100 = GpuSpeed(
    half_flops=989.4e12,
    float32_flops=66.9e12,
    memory_bytes_per_s=3.35e12,
    l2_bytes=50 * _MIB,
    nvlink_bytes_per_s=450e9,
    pcie_bytes_per_s=64e9,
    network_bytes_per_s=50e9,
    source="NVIDIA H100 data sheet and architecture white paper (SXM5); DGX H100: 400 Gb/s a GPU",
)
_A100 = GpuSpeed(
    half_flops=312e12,
    float32_flops=19.5e12,
    memory_bytes_per_s=2.039e12,
    l2_bytes=40 * _MIB,
    nvlink_bytes_per_s=300e9,
    pcie_bytes_per_s=32e9,
    network_bytes_per_s=25e9,
    source="NVIDIA A100 data sheet and architecture white paper (SXM4); DGX A100: 200 Gb/s a GPU",
)
_B200 = GpuSpeed(
    half_flops=2250e12,
    float32_flops=75e12,
    memory_bytes_per_s=7.7e12,
    l2_bytes=126 * _MIB,
    nvlink_bytes_per_s=900e9,
    pcie_bytes_per_s=64e9,
    network_bytes_per_s=50e9,
    source="NVIDIA HGX B200 data sheet, an eighth of it; DGX B200: 400 Gb/s a GPU",
)
_V100 = GpuSpeed(
    half_flops=125e12,
    float32_flops=15.7e12,
    memory_bytes_per_s=0.9e12,
    l2_bytes=6 * _MIB,
    nvlink_bytes_per_s=150e9,
    pcie_bytes_per_s=16e9,
    network_bytes_per_s=6.25e9,
    source="NVIDIA V100 data sheet (SXM2); DGX-1: four 100 Gb/s links for eight GPUs",
    bfloat16=False,
)
_T4 = GpuSpeed(
    half_flops=65e12,
    float32_flops=8.1e12,
    memory_bytes_per_s=0.32e12,
    l2_bytes=4 * _MIB,
    nvlink_bytes_per_s=0,
    pcie_bytes_per_s=16e9,
    network_bytes_per_s=12.5e9 / 8,
    source="NVIDIA T4 data sheet; one 100 Gb/s link for eight GPUs is assumed",
    bfloat16=False,
)

GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuModel(
            "h200",
            int(139.80 * GIB),
            HOPPER_WORKSPACE,
            replace(_H100, memory_bytes_per_s=4.8e12, source="NVIDIA H200 data sheet, else H100's"),
        ),
        GpuModel("h100", int(79.10 * GIB), HOPPER_WORKSPACE, _H100),
        GpuModel("b200", int(178.35 * GIB), HOPPER_WORKSPACE, _B200),
        GpuModel("a100-80", int(79.15 * GIB), _OLDER_WORKSPACE, _A100),
        GpuModel(
            "a100-40",
            int(39.39 * GIB),
            _OLDER_WORKSPACE,
            replace(_A100, memory_bytes_per_s=1.555e12),
        ),
        GpuModel("v100-32", int(31.73 * GIB), _OLDER_WORKSPACE, _V100),
        GpuModel("t4", int(14.58 * GIB), _OLDER_WORKSPACE, _T4),
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
