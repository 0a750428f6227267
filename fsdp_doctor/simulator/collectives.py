"""Time of a collective by an alpha-beta model: latency by steps, plus bytes over bandwidth.

Latencies are NCCL's own (``src/graph/tuning.cc``, ``ncclTunerConstantsDefaults``): a base, and one
for each step over NVLink or the network; low by its LL protocol, high by its simple one. Of the
links' bandwidth all counts for the low end; for the high end what NCCL itself plans with
(``src/graph/topo.h``: 20.6 of 25 GB/s for an NVLink of Hopper), and of a network 22 of 50 GB/s, as
``torch/_inductor/comm_analysis.py`` (2.13) has it. No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_doctor.gpus_table import GpuSpeed
from fsdp_doctor.model.work import Collective, TimeRange

GPUS_PER_HOST = 8

_BASE_S = (6.6e-6, 8.4e-6)
_NVLINK_STEP_S = (0.6e-6, 3.4e-6)
_NETWORK_STEP_S = (2.7e-6, 14.0e-6)
_PCIE_STEP_S = (1.0e-6, 5.7e-6)
_NVLINK_REACHED = 20.6 / 25
_NETWORK_REACHED = 22 / 50
_PCIE_REACHED = 10 / 64
"""10 GB/s by way of the host's memory (``comm_analysis.py``)."""
_TRANSFERS = {"all_reduce": 2.0}
"""How often the payload crosses a rank's link; once for the others."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the ranks of a group are."""

    ranks: int
    local: int
    """On each host."""

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.local)


def collective_time(item: Collective, speed: GpuSpeed, gpus_per_host: int) -> TimeRange:
    """Return the time of one collective; 0 in a group of one rank."""
    if item.group_size < 2:
        return TimeRange(low_s=0.0, high_s=0.0)
    local = max(1, min(item.group_size, gpus_per_host // item.stride))
    place = _Place(item.group_size, local)
    transfers = _TRANSFERS.get(item.kind, 1.0)
    moved = transfers * item.payload_bytes * (place.ranks - 1) / place.ranks
    low, high = _bandwidth(place, speed)
    return TimeRange(
        low_s=_latency(place, speed, transfers, 0) + moved / low,
        high_s=_latency(place, speed, transfers, 1) + moved / high,
    )


def _bandwidth(place: _Place, speed: GpuSpeed) -> tuple[float, float]:
    """Bytes a second that a rank of a ring sends, at best and at worst.

    Between hosts the ring has as many network links as the group has ranks on a host.
    """
    if speed.nvlink_bytes_per_s:
        inside = (speed.nvlink_bytes_per_s, speed.nvlink_bytes_per_s * _NVLINK_REACHED)
    else:
        inside = (speed.pcie_bytes_per_s, speed.pcie_bytes_per_s * _PCIE_REACHED)
    if place.hosts == 1:
        return inside
    network = speed.network_bytes_per_s * place.local
    if place.local == 1:
        return network, network * _NETWORK_REACHED
    return min(inside[0], network), min(inside[1], network * _NETWORK_REACHED)


def _latency(place: _Place, speed: GpuSpeed, transfers: float, end: int) -> float:
    """Steps of a tree (low end) or of a ring (high end)."""
    step = _NVLINK_STEP_S if speed.nvlink_bytes_per_s else _PCIE_STEP_S
    if end == 0:
        steps = math.log2(place.local) * step[0] + math.log2(place.hosts) * _NETWORK_STEP_S[0]
        return _BASE_S[0] + transfers * steps
    between = place.hosts if place.hosts > 1 else 0
    inside = place.ranks - 1 - between
    return _BASE_S[1] + transfers * (max(inside, 0) * step[1] + between * _NETWORK_STEP_S[1])
