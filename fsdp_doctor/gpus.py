"""Count GPUs without importing torch or creating a CUDA context."""

from __future__ import annotations

import os
import re
from pathlib import Path


def visible_gpu_count() -> int:
    """Return how many NVIDIA GPUs this process may use (``CUDA_VISIBLE_DEVICES`` counts)."""
    devices = Path("/dev")
    present = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.iterdir())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [item for item in visible.split(",") if item.strip() and item.strip() != "-1"]
    return min(present, len(named))
