"""Iteration and memory lines, one file per framework. ``FAMILIES`` is all of them."""

from __future__ import annotations

from fsdp_doctor.logs.progress.base import Family, Reader
from fsdp_doctor.logs.progress.deepspeed import FAMILIES as DEEPSPEED
from fsdp_doctor.logs.progress.lightning import FAMILIES as LIGHTNING
from fsdp_doctor.logs.progress.megatron import FAMILIES as MEGATRON
from fsdp_doctor.logs.progress.torchtitan import FAMILIES as TORCHTITAN
from fsdp_doctor.logs.progress.tqdm_bars import FAMILIES as TQDM
from fsdp_doctor.logs.progress.trackers import FAMILIES as TRACKERS

FAMILIES: tuple[Family, ...] = (
    *MEGATRON,
    *TORCHTITAN,
    *DEEPSPEED,
    *LIGHTNING,
    *TQDM,
    *TRACKERS,
)

__all__ = ["FAMILIES", "Family", "Reader"]
