"""Which combinations of changed fields to evaluate, and in which order.

A *point* is the set of fields that have B's value; the empty point is A, the full one is B. For k
fields: every subset up to 3; from 4 on both ends of every field (alone in A, and missing from B),
2k + 2 points, from which shares are exact as long as no three fields interact; from 8 on fields are
screened first, presumed harmless ones as one group (group testing), and only those that move
something get points of their own. With up to 3 fields both ends are every subset, so one rule
serves all three.

The design is data: ``next_points`` says what is still missing from what is known, so that a search
can stop anywhere and go on later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Point = frozenset[int]
"""Numbers of the fields that have B's value."""
Moved = Callable[[Point, Point], bool | None]
"""Whether two evaluated points differ in anything; None: one of them could not be evaluated."""

FACTORIAL_LIMIT = 3
SCREEN_FROM = 8

Kind = Literal["factorial", "two-ended", "screened"]


def kind_of(count: int, *, screen_from: int = SCREEN_FROM) -> Kind:
    """Return how ``count`` fields are examined."""
    if count <= FACTORIAL_LIMIT:
        return "factorial"
    return "two-ended" if count < screen_from else "screened"


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The points of ``count`` fields."""

    count: int
    presumed_inert: frozenset[int] = frozenset()
    """Fields believed not to move the metric: screened as one group where screening is on."""
    screen_from: int = SCREEN_FROM
    """Number of fields from which they are screened."""
    _full: Point = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        object.__setattr__(self, "_full", frozenset(range(self.count)))

    @property
    def kind(self) -> Kind:
        """How the fields are examined."""
        return kind_of(self.count, screen_from=self.screen_from)

    @property
    def ends(self) -> tuple[Point, Point]:
        """A and B."""
        return frozenset(), self._full

    def first_in(self, group: Collection[int]) -> Point:
        """Return A with the fields of ``group`` flipped."""
        return frozenset(group)

    def last_out(self, group: Collection[int]) -> Point:
        """Return B with the fields of ``group`` flipped back."""
        return self._full - frozenset(group)

    def next_points(self, known: Collection[Point], moved: Moved) -> list[Point]:
        """Return the points to evaluate next, each once; none: all that is needed is known."""
        needed = dict.fromkeys(self.ends)
        if self.kind == "screened":
            for group in self._groups():
                needed.update(dict.fromkeys(self._screen(group, known, moved)))
        else:
            for number in range(self.count):
                needed[self.first_in([number])] = None
            for number in range(self.count):
                needed[self.last_out([number])] = None
        return [point for point in needed if point not in known]

    def all_points(self) -> list[Point]:
        """Return the points if every field needs its own: the most that can be asked for."""
        return self.next_points((), lambda _x, _y: True)

    def _groups(self) -> list[list[int]]:
        inert = sorted(self.presumed_inert)
        singles = [[n] for n in range(self.count) if n not in self.presumed_inert]
        return singles + ([inert] if inert else [])

    def _screen(
        self, group: Sequence[int], known: Collection[Point], moved: Moved
    ) -> Iterator[Point]:
        """Yield the points of a group; of its halves once it is known to move something."""
        first, last = self.first_in(group), self.last_out(group)
        yield first
        yield last
        if len(group) == 1 or not {first, last, *self.ends} <= set(known):
            return
        start, end = self.ends
        if moved(start, first) is False and moved(last, end) is False:
            return
        middle = len(group) // 2
        yield from self._screen(group[:middle], known, moved)
        yield from self._screen(group[middle:], known, moved)

    def inert(self, known: Collection[Point], moved: Moved) -> frozenset[int]:
        """Return the fields that moved nothing at both ends, alone or in a group that did not.

        A lone field that can run at one end only counts by that one: where another field cannot do
        without it, what both do is the other's.
        """
        found: set[int] = set()
        for group in self._tested():
            first, last = self.first_in(group), self.last_out(group)
            if first not in known or last not in known:
                continue
            ends = {moved(self.ends[0], first), moved(last, self.ends[1])}
            if ends == {False} or (len(group) == 1 and ends == {False, None}):
                found.update(group)
        return frozenset(found)

    def _tested(self) -> Iterable[Sequence[int]]:
        """Yield every group that may have been evaluated."""
        if self.kind != "screened":
            yield from ([n] for n in range(self.count))
            return
        waiting = self._groups()
        while waiting:
            group = waiting.pop()
            yield group
            if len(group) > 1:
                middle = len(group) // 2
                waiting += [group[:middle], group[middle:]]


def run_design(
    design: Design, known: Collection[Point], moved: Moved, evaluate: Callable[[list[Point]], None]
) -> None:
    """Evaluate, batch after batch, until nothing is missing. ``evaluate`` adds to ``known``."""
    while missing := design.next_points(known, moved):
        evaluate(missing)
        if any(point not in known for point in missing):
            raise ValueError("a point was asked for and not evaluated")
