"""What memory did: events, categories, timeline. No torch; every source feeds the same log."""

from fsdp_doctor.memory.events import Allocation, EventLog, Label, PhaseSpan
from fsdp_doctor.memory.timeline import StepMemory, analyse, build_anatomy

__all__ = [
    "Allocation",
    "EventLog",
    "Label",
    "PhaseSpan",
    "StepMemory",
    "analyse",
    "build_anatomy",
]
