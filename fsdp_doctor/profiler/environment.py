"""The facts about machine and software that a comparison must know. Imports torch."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import torch

from fsdp_doctor.redact import redact, redact_text

_PREFIXES = (
    "PYTORCH_", "TORCH_", "NCCL_", "CUDA_", "CUBLAS_", "OMP_", "MKL_", "GLOO_", "FSDP_",
    "ACCELERATE_", "NVTE_", "UCX_", "SLURM_JOB_ID", "SLURM_NNODES",
)  # fmt: skip
_IGNORED = {"CUDA_VISIBLE_DEVICES_ORIGINAL", "OMPI_COMM_WORLD_RANK", "CUDA_VERSION"}


def collect_environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device facts, relevant variables and the git state of the working folder.

    Everything is redacted; a fact that cannot be had is None.
    """
    facts: dict[str, Any] = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        "nccl": _nccl_version() if device.type == "cuda" else None,
        "driver": None,
        "device_name": None,
        "device_total_bytes": None,
        "device_count": torch.cuda.device_count() if device.type == "cuda" else 0,
        "host_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "tf32_matmul": torch.backends.cuda.matmul.allow_tf32 if device.type == "cuda" else None,
        "variables": _variables(),
        "git": _git_state(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device_name"] = properties.name
        facts["device_total_bytes"] = properties.total_memory
        facts["driver"] = _driver_version()
    else:
        facts["device_name"] = _processor_name()
    return facts


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
