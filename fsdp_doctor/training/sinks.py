"""Who listens to a training job."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from fsdp_doctor.model.memory import Phase


class PhaseSink(Protocol):
    """Whoever wants to know which phase runs (the recorder, the simulator)."""

    def phase(self, phase: Phase, microbatch: int = 0) -> AbstractContextManager[None]:
        """Return the context of one phase."""

    def inputs(self, batch: Any) -> None:
        """Take note of a micro batch."""
