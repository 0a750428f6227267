"""A log of memory events as a tape: one mark after the other, layers told apart by numbers only.

Two runs of a model that differ in their number of layers have logs that differ in every index. On a
tape every mark has a *key*, which is the same for each layer (``blocks.*.attention``), and
*numbers*, which may differ: the layer, a small size, how far back the thing lies that the mark
refers to. What is freed is named by its key and by how many younger blocks with that key live.
No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from fsdp_doctor.memory.events import Allocation, EventLog, Label, PhaseSpan, Scope
from fsdp_doctor.memory.replay import StreamNotes

SMALL_BYTES = 1 << 16
"""Sizes below this are numbers, larger ones belong to the key: a list with an entry for each
parameter grows with the layers."""
_NO_LAYER = -1
_Value = TypeVar("_Value")

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing that happens. What the numbers mean depends on ``key[0]``."""

    key: Key
    numbers: tuple[int, ...]


@dataclass(slots=True)
class Tape:
    """A whole run. ``blocks``: dotted path of the list whose members are the layers."""

    marks: list[Mark]
    blocks: str
    identified: bool
    head_module: str | None


class _Names:
    """Takes the layer's number out of module paths, and puts one in."""

    def __init__(self, blocks: str) -> None:
        self._prefix = f"{blocks}."

    def fold(self, module: str | None) -> tuple[str | None, int]:
        if module is None or not module.startswith(self._prefix):
            return module, _NO_LAYER
        number, dot, rest = module[len(self._prefix) :].partition(".")
        if not number.isdecimal():
            return module, _NO_LAYER
        return f"{self._prefix}*{dot}{rest}", int(number)

    def unfold(self, module: str | None, layer: int) -> str | None:
        if module is None or layer == _NO_LAYER:
            return module
        return module.replace("*", str(layer), 1)

    def fold_label(self, label: Label | None) -> tuple[Label | None, int]:
        if label is None:
            return None, _NO_LAYER
        module, layer = self.fold(label.module)
        return label._replace(module=module), layer

    def unfold_label(self, label: Label | None, layer: int) -> Label | None:
        return None if label is None else label._replace(module=self.unfold(label.module, layer))


# -- writing ----------------------------------------------------------------------------------


def write_tape(log: EventLog, streams: StreamNotes, blocks: str) -> Tape:
    """Return the log as a tape."""
    marks = list(_Writer(log, streams, blocks).marks())
    return Tape(marks, blocks, log.identified, log.head_module)


class _Writer:
    def __init__(self, log: EventLog, streams: StreamNotes, blocks: str) -> None:
        self._log, self._streams = log, streams
        self._names = _Names(blocks)
        self._keys: list[Key] = []
        self._alive: dict[Key, list[int]] = {}
        self._open: list[int] = []
        self._markers_at = _by_position(log, streams)

    def marks(self) -> Iterator[Mark]:
        for position in range(self._log.position + 1):
            yield from self._markers(position)
            if position < self._log.position:
                event = self._log.events[position]
                yield self._birth(event - 1) if event > 0 else self._death(-event - 1)

    def _markers(self, position: int) -> Iterator[Mark]:
        for kind, value in self._markers_at.get(position, ()):
            if kind == "wait":
                yield Mark(("wait",), (position - value,))
            elif kind == "phase":
                span: PhaseSpan = value
                key = ("phase", span.step, span.phase, span.microbatch, span.end is None)
                yield Mark(key, ())
            elif kind == "end phase":
                yield Mark(("end phase",), ())
            elif kind == "scope":
                module, layer = self._names.fold(self._log.scopes[value].module)
                self._open.append(value)
                yield Mark(("scope", module), (layer,))
            else:
                rank = _rank(self._open, value)
                self._open.remove(value)
                yield Mark(("end scope",), (rank,))

    def _birth(self, index: int) -> Mark:
        a = self._log.allocations[index]
        module, layer = self._names.fold(a.module)
        label, label_layer = self._names.fold_label(a.label)
        hint, hint_layer = self._names.fold_label(a.hint)
        small = a.requested_bytes < SMALL_BYTES
        place = (a.step, a.phase, a.microbatch, a.region, module)
        made = (a.operator, a.frames, label, hint)
        uses = frozenset(self._streams.uses.get(a.id, ()))
        size = (None, None) if small else (a.requested_bytes, a.size_bytes)
        key = ("birth", size, a.stream, uses, place, made, a.scope is None)
        scope = 0 if a.scope is None else _rank(self._open, a.scope)
        sizes = (a.requested_bytes, a.size_bytes) if small else (0, 0)
        self._keys.append(key)
        self._alive.setdefault(key, []).append(index)
        return Mark(key, (layer, label_layer, hint_layer, scope, *sizes))

    def _death(self, index: int) -> Mark:
        key = self._keys[index]
        living = self._alive[key]
        rank = _rank(living, index)
        del living[len(living) - 1 - rank]
        return Mark(("death", key), (rank,))


def _rank(values: list[int], value: int) -> int:
    """How many values stand behind the last ``value``."""
    for rank, found in enumerate(reversed(values)):
        if found == value:
            return rank
    raise ValueError(f"{value} is not there")


def _by_position(log: EventLog, streams: StreamNotes) -> dict[int, list[tuple[str, Any]]]:
    """Position -> what is not an event, in an order that reads back to the same log."""
    found: dict[int, list[tuple[str, Any]]] = {}
    for position, kind, value in _beside(log, streams):
        if position is not None:
            found.setdefault(position, []).append((kind, value))
    return found


def _beside(log: EventLog, streams: StreamNotes) -> Iterator[tuple[int | None, str, Any]]:
    """Yield ends before beginnings; inner calls end first, empty ones where they begin."""
    for index, scope in reversed(list(enumerate(log.scopes))):
        if scope.end != scope.begin:
            yield scope.end, "end scope", index
    for span in log.phases:
        if span.end != span.begin:
            yield span.end, "end phase", span
    for span in log.phases:
        yield span.begin, "phase", span
        if span.end == span.begin:
            yield span.end, "end phase", span
    for index, scope in enumerate(log.scopes):
        yield scope.begin, "scope", index
        if scope.end == scope.begin:
            yield scope.end, "end scope", index
    for position, earlier in streams.waits:
        yield position, "wait", earlier


# -- reading ----------------------------------------------------------------------------------


def read_tape(tape: Tape) -> tuple[EventLog, StreamNotes]:
    """Return the log that a tape describes.

    Raises ValueError when a mark refers to what is not there.
    """
    return _Reader(tape).read()


class _Reader:
    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._names = _Names(tape.blocks)
        self._log = EventLog(identified=tape.identified, head_module=tape.head_module)
        self._streams = StreamNotes()
        self._alive: dict[Key, list[Allocation]] = {}
        self._open: list[int] = []
        self._phase: PhaseSpan | None = None

    def read(self) -> tuple[EventLog, StreamNotes]:
        act = {
            "birth": self._birth,
            "death": self._death,
            "scope": self._scope,
            "end scope": self._end_scope,
            "phase": self._begin_phase,
            "end phase": self._end_phase,
            "wait": self._wait,
        }
        for mark in self._tape.marks:
            act[mark.key[0]](mark.key, mark.numbers)
        return self._log, self._streams

    def _birth(self, key: Key, numbers: tuple[int, ...]) -> None:
        _, (requested, size), stream, uses, place, made, unscoped = key
        layer, label_layer, hint_layer, scope, small_requested, small_size = numbers
        step, phase, microbatch, region, module = place
        operator, frames, label, hint = made
        log = self._log
        allocation = Allocation(
            id=len(log.allocations),
            requested_bytes=small_requested if requested is None else requested,
            size_bytes=small_size if size is None else size,
            stream=stream,
            step=step,
            phase=phase,
            microbatch=microbatch,
            region=region,
            module=self._names.unfold(module, layer),
            scope=None if unscoped else _back(self._open, scope),
            operator=operator,
            frames=frames,
            born=log.position,
            label=self._names.unfold_label(label, label_layer),
            hint=self._names.unfold_label(hint, hint_layer),
        )
        if allocation.requested_bytes <= 0 or allocation.size_bytes <= 0:
            raise ValueError("a block without bytes")
        log.allocations.append(allocation)
        log.events.append(allocation.id + 1)
        if uses:
            self._streams.uses[allocation.id] = set(uses)
        self._alive.setdefault(key, []).append(allocation)

    def _death(self, key: Key, numbers: tuple[int, ...]) -> None:
        living = self._alive.get(key[1], [])
        allocation = _back(living, numbers[0])
        del living[len(living) - 1 - numbers[0]]
        allocation.died = self._log.position
        self._log.events.append(-(allocation.id + 1))

    def _scope(self, key: Key, numbers: tuple[int, ...]) -> None:
        self._open.append(len(self._log.scopes))
        module = self._names.unfold(key[1], numbers[0])
        self._log.scopes.append(Scope(module=module or "", begin=self._log.position))

    def _end_scope(self, _key: Key, numbers: tuple[int, ...]) -> None:
        index = _back(self._open, numbers[0])
        self._open.remove(index)
        self._log.scopes[index].end = self._log.position

    def _begin_phase(self, key: Key, _numbers: tuple[int, ...]) -> None:
        _, step, phase, microbatch, _ = key
        self._phase = PhaseSpan(
            step=step, phase=phase, microbatch=microbatch, begin=self._log.position
        )
        self._log.phases.append(self._phase)

    def _end_phase(self, _key: Key, _numbers: tuple[int, ...]) -> None:
        if self._phase is None:
            raise ValueError("a phase ends that did not begin")
        self._phase.end = self._log.position

    def _wait(self, _key: Key, numbers: tuple[int, ...]) -> None:
        position = self._log.position
        if not 0 <= numbers[0] <= position:
            raise ValueError("a wait for what has not happened")
        self._streams.waits.append((position, position - numbers[0]))


def _back(values: list[_Value], rank: int) -> _Value:
    """Return the value that ``rank`` others stand behind."""
    if not 0 <= rank < len(values):
        raise ValueError(f"nothing lies {rank} back")
    return values[len(values) - 1 - rank]
