"""What a launch is: passed from the command line to the processes it starts. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

PLAN_NAME = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One execution of a spec."""

    run_directory: str
    spec: dict[str, object]
    """The spec as a mapping (``config.spec.spec_to_mapping``)."""
    world_size: int
    one_rank_of: int | None = None
    """Play one rank of this many, through torch's fake process group."""
    rank: int = 0
    """The rank that is played with ``one_rank_of``."""
    device: str = "auto"
    """``cuda``, ``cpu`` or ``auto``: CUDA when every local rank has a GPU of its own."""
    observe: bool = True
    """Whether the first steps are watched allocation by allocation."""
    record: bool = True
    """Whether phases are recorded at all (off only to measure what recording costs)."""
    memory_fraction: float | None = None
    """``torch.cuda.set_per_process_memory_fraction``: a smaller GPU than there is."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that really run."""
        return (self.rank,) if self.one_rank_of else tuple(range(self.world_size))

    def write(self) -> Path:
        """Write the plan into the run directory and return its path."""
        path = Path(self.run_directory) / PLAN_NAME
        path.touch(mode=0o600)  # the spec may hold secrets; it is removed when the run ends
        path.write_bytes(msgspec.json.encode(self))
        return path


def read_plan(path: Path) -> LaunchPlan:
    """Read a plan that ``LaunchPlan.write`` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=LaunchPlan)
