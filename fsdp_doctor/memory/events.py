"""One stream of memory events, whoever saw them.

The CPU tracker writes it live, the CUDA history reader writes it afterwards from the allocator's
trace. A *position* is the number of events before a moment: position 0 is the start, position
``len(events)`` the end. Everything that happens (phases, module calls) is placed by position, so
no clock is needed once the log exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fsdp_doctor.model.memory import Category, Phase

Region = Literal["", "forward", "loss", "backward", "loss_backward", "recompute"]
"""Where inside a phase: a module's forward, after the model's forward, a module's backward,
before the first module's backward, or a forward that runs inside backward (checkpointing)."""


class Label(NamedTuple):
    """What a block is known to hold, because somebody holds the tensor."""

    category: Category
    subcategory: str | None = None
    module: str | None = None
    """Dotted path of the parameter or module it belongs to."""


_STRENGTH = {
    Category.PARAMETERS: 6,
    Category.OPTIMIZER_STATE: 5,
    Category.GRADIENTS: 4,
    Category.BUFFERS: 3,
    Category.INPUTS: 2,
    Category.UNSHARDED_GRADIENTS: 1,
    Category.UNSHARDED_PARAMETERS: 1,
}
"""A storage that two things share is what the longer-lived one says."""


def stronger(new: Label, old: Label | None) -> bool:
    """Whether ``new`` should replace ``old`` on the same storage."""
    return old is None or _STRENGTH.get(new.category, 0) > _STRENGTH.get(old.category, 0)


@dataclass(slots=True, kw_only=True)
class Allocation:
    """One block, from its birth to its death."""

    id: int
    size_bytes: int
    """As the allocator rounds it."""
    requested_bytes: int
    """As it was asked for."""
    stream: int = 0
    step: int = -1
    phase: Phase = Phase.UNKNOWN
    microbatch: int = 0
    region: Region = ""
    module: str | None = None
    scope: int | None = None
    """Index in ``EventLog.scopes`` of the innermost module call it was born in."""
    operator: str | None = None
    """Dispatcher name, e.g. ``aten.mm.default``."""
    frames: tuple[str, ...] = ()
    """Python frames, innermost first, as ``file:line function``."""
    born: int = 0
    """Index of its event: it is alive at positions > ``born``."""
    died: int | None = None
    """Index of the event that freed it: it is alive at positions <= ``died``. None: never."""
    label: Label | None = None
    """Known identity (a parameter, a gradient...)."""
    hint: Label | None = None
    """What made it is known; gives way to ``label``."""
    category: Category | None = None
    subcategory: str | None = None

    def alive_at(self, position: int) -> bool:
        """Whether the block exists after the first ``position`` events."""
        return self.born < position and (self.died is None or self.died >= position)


@dataclass(slots=True, kw_only=True)
class PhaseSpan:
    """One phase of one step, between two positions."""

    step: int
    phase: Phase
    microbatch: int
    begin: int
    end: int | None = None
    """None while the phase runs."""


@dataclass(slots=True, kw_only=True)
class Scope:
    """One call of a module's ``forward``, between two positions."""

    module: str
    """Dotted path; ``""`` is the whole model."""
    begin: int
    end: int | None = None


@dataclass(slots=True)
class EventLog:
    """Append-only log of allocations and frees, placed in phases and module calls."""

    allocations: list[Allocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    """``id + 1`` for a birth, ``-(id + 1)`` for a death."""
    phases: list[PhaseSpan] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    identified: bool = False
    """Whether model and optimizer were asked what they hold: no need to guess gradients."""
    current_bytes: int = 0
    """Sum of ``size_bytes`` alive now."""
    peak_bytes: int = 0
    """Largest ``current_bytes`` since the running phase began."""
    head_module: str | None = None
    """Dotted path of the vocabulary projection, where it was recognised."""
    _phase: PhaseSpan | None = None
    _stack: list[int] = field(default_factory=list)
    _backward_module: str | None = None
    _after_model: bool = False

    @property
    def position(self) -> int:
        """How many events there are so far."""
        return len(self.events)

    def allocate(
        self,
        requested_bytes: int,
        *,
        size_bytes: int | None = None,
        stream: int = 0,
        operator: str | None = None,
        frames: tuple[str, ...] = (),
    ) -> Allocation:
        """A block is born here and now. ``size_bytes`` defaults to what was asked for."""
        size = requested_bytes if size_bytes is None else size_bytes
        region, module, scope = self._place()
        span = self._phase
        allocation = Allocation(
            id=len(self.allocations),
            size_bytes=size,
            requested_bytes=requested_bytes,
            stream=stream,
            step=-1 if span is None else span.step,
            phase=Phase.UNKNOWN if span is None else span.phase,
            microbatch=0 if span is None else span.microbatch,
            region=region,
            module=module,
            scope=scope,
            operator=operator,
            frames=frames,
            born=len(self.events),
        )
        self.allocations.append(allocation)
        self.events.append(allocation.id + 1)
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        return allocation

    def free(self, allocation: Allocation) -> None:
        """The block dies. A second death is a caller's error.

        Raises:
            ValueError: the block is dead already.
        """
        if allocation.died is not None:
            raise ValueError(f"allocation {allocation.id} was freed before")
        allocation.died = len(self.events)
        self.events.append(-(allocation.id + 1))
        self.current_bytes -= allocation.size_bytes

    def resize(
        self,
        allocation: Allocation,
        requested_bytes: int,
        *,
        size_bytes: int | None = None,
        operator: str | None = None,
        frames: tuple[str, ...] = (),
    ) -> Allocation:
        """The block moves: the new one is born before the old one dies. Labels move with it."""
        new = self.allocate(
            requested_bytes,
            size_bytes=size_bytes,
            stream=allocation.stream,
            operator=operator,
            frames=frames,
        )
        new.label, new.hint = allocation.label, allocation.hint
        if allocation.died is None:
            self.free(allocation)
        return new

    def begin_phase(self, step: int, phase: Phase, microbatch: int = 0) -> None:
        """A phase begins; a running one ends."""
        self.end_phase()
        self._phase = PhaseSpan(
            step=step, phase=phase, microbatch=microbatch, begin=len(self.events)
        )
        self.phases.append(self._phase)
        self.peak_bytes = self.current_bytes
        self._stack.clear()
        self._backward_module = None
        self._after_model = False

    def end_phase(self) -> None:
        """The running phase, if any, ends."""
        if self._phase is not None:
            self._phase.end = len(self.events)
            self._phase = None

    def enter_module(self, module: str) -> None:
        """A module's forward begins."""
        self._stack.append(len(self.scopes))
        self.scopes.append(Scope(module=module, begin=len(self.events)))

    def leave_module(self, module: str) -> None:
        """A module's forward ends, with its inner ones that were left by an exception."""
        if not any(self.scopes[index].module == module for index in self._stack):
            return
        while self._stack:
            scope = self.scopes[self._stack.pop()]
            scope.end = len(self.events)
            if scope.module == module:
                break
        if module == "" and not self._stack:
            self._after_model = True

    def enter_backward(self, module: str) -> None:
        """The backward of a module's output begins: what follows belongs to the module."""
        self._backward_module = module

    def _place(self) -> tuple[Region, str | None, int | None]:
        """Region, module and scope of what happens now."""
        phase = None if self._phase is None else self._phase.phase
        if self._stack:
            index = self._stack[-1]
            region: Region = "recompute" if phase is Phase.BACKWARD else "forward"
            return region, self.scopes[index].module, index
        if phase is Phase.FORWARD and self._after_model:
            return "loss", None, None
        if phase is Phase.BACKWARD:
            if self._backward_module is None:
                return "loss_backward", None, None
            return "backward", self._backward_module, None
        return "", None, None
