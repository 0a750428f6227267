"""What a log yields: failures with their numbers, and where each line came from."""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY_KINDS = frozenset(
    {
        "device_oom",
        "driver_oom",
        "library_alloc",
        "nccl_alloc",
        "pinned_alloc",
        "host_alloc",
        "shared_memory",
        "host_oom_kill",
    }
)
"""Kinds of failures that are about memory; ``kernel_resource`` and ``not_memory`` are not."""


@dataclass(slots=True, kw_only=True)
class Origin:
    """Who printed a line, as far as its prefixes and its file tell."""

    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    time: float | None = None
    """Seconds since 1970; a log without time zone is read as UTC."""
    iteration: int | None = None


@dataclass(slots=True, kw_only=True)
class Message:
    """A failure as one message says it, before it is known who printed it."""

    kind: str
    form: str
    """Name of the wording, see ``docs/oom.md``."""
    fatal: bool = True
    backend: str | None = None
    device: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    time: float | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    process_bytes: int | None = None
    other_processes_bytes: int | None = None
    processes: list[tuple[int, int]] = field(default_factory=list)
    private_pool_bytes: int | None = None
    limit_bytes: int | None = None
    exit_code: int | None = None
    count: int | None = None
    """How many processes a line that counts them speaks of."""
    victim: bool = False
    """The message says that another process failed, or that this one was told to stop."""


@dataclass(slots=True, kw_only=True)
class Failure(Message):
    """A failure in a log."""

    file: str
    line: int
    text: str
    """The message, shortened."""
    iteration: int | None = None
    phase: str = "unknown"
    moment: str = "unknown"
    """before_training, first_step, steady, evaluation, checkpoint or unknown."""
    frames: list[str] = field(default_factory=list)
    """Innermost first: ``file:line in function: source line``."""
    context: str = ""
    """Lines around the message, lower case, bounded; for the diagnosis."""
    repeats: int = 0
    """How often the same failure was printed again."""
    victim_of: int | None = None
    fragmentation: str = "unknown"
    order: int = 0
    """Place in the order of reading."""


@dataclass(slots=True, kw_only=True)
class Note:
    """A line that is no failure but evidence, e.g. a warning about memory pressure."""

    name: str
    text: str
    file: str
    line: int
    rank: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    repeats: int = 0
