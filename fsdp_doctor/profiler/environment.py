"""The facts about machine and software that a comparison must know. Imports torch."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from fsdp_doctor.redact import redact, redact_text

_PREFIXES = (
    "PYTORCH_", "TORCH_", "NCCL_", "CUDA_", "CUBLAS_", "OMP_", "MKL_", "GLOO_", "FSDP_",
    "ACCELERATE_", "NVTE_", "UCX_", "SLURM_JOB_ID", "SLURM_NNODES", "TORCHINDUCTOR_",
    "TORCHDYNAMO_", "NVIDIA_TF32_OVERRIDE",
)  # fmt: skip
_IGNORED = {"CUDA_VISIBLE_DEVICES_ORIGINAL", "OMPI_COMM_WORLD_RANK", "CUDA_VERSION"}


def collect_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device facts, relevant variables and the git state of the working folder.

    Everything is redacted; a fact that cannot be had is None.
    """
    cuda = device.type == "cuda"
    facts: dict[str, Callable[[], Any]] = {
        "torch": lambda: str(torch.__version__),
        "python": platform.python_version,
        "platform": platform.platform,
        "cuda": lambda: torch.version.cuda,
        "cudnn": lambda: torch.backends.cudnn.version() if cuda else None,
        "nccl": lambda: _nccl_version() if cuda else None,
        "driver": lambda: _driver_version() if cuda else None,
        "device_name": lambda: (
            torch.cuda.get_device_properties(device).name if cuda else _processor_name()
        ),
        "device_total_bytes": lambda: (
            torch.cuda.get_device_properties(device).total_memory if cuda else None
        ),
        "device_count": lambda: torch.cuda.device_count() if cuda else 0,
        "host_cores": os.cpu_count,
        "threads": torch.get_num_threads,
        "tf32_matmul": lambda: tf32_matmul() if cuda else None,
        "variables": _variables,
        "git": _git_state,
    }
    return {name: _fact(read) for name, read in facts.items()}


def _fact(read: Callable[[], Any]) -> Any:
    """Return a fact, or None when it cannot be had: no run fails for want of one."""
    try:
        return read()
    except Exception:  # noqa: BLE001 (drivers and libraries raise what they like; None says so)
        return None


def tf32_matmul() -> bool:
    """Return whether float32 matrix products may use TF32.

    Since torch 2.9 ``fp32_precision`` tells; reading ``allow_tf32`` raises once it was set.
    """
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    if precision is not None:
        return bool(precision == "tf32")
    return bool(matmul.allow_tf32)


def _nccl_version() -> str | None:
    try:
        return ".".join(str(part) for part in torch.cuda.nccl.version())
    except (RuntimeError, AttributeError):
        return None


def _driver_version() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except (ImportError, OSError, RuntimeError):
        return None
    except Exception as error:  # noqa: BLE001 (pynvml raises NVMLError, a plain Exception)
        return f"unknown ({type(error).__name__})"
    return version.decode() if isinstance(version, bytes) else str(version)


def _processor_name() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:  # noqa: PTH123 (no Path gain)
            for line in stream:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def _variables() -> dict[str, str]:
    chosen = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) and name not in _IGNORED
    }
    redacted: dict[str, str] = redact(chosen)
    return redacted


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],  # noqa: S607 (the user's own git)
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return redact_text(done.stdout.strip()) if done.returncode == 0 else None


def _git_state() -> dict[str, Any] | None:
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "-uno"))}
