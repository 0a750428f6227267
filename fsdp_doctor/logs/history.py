"""The history of a job: step times and memory of every rank, as compact columns."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

MAX_RANKS = 65_536
MAX_TIMERS = 256


def _steps() -> array[int]:
    return array("q")


def _numbers() -> array[float]:
    return array("d")


@dataclass(slots=True)
class RankHistory:
    """One rank's lines. Steps and values are parallel columns; NaN where a line has no value."""

    time_steps: array[int] = field(default_factory=_steps)
    times_s: array[float] = field(default_factory=_numbers)
    memory_steps: array[int] = field(default_factory=_steps)
    """-1: the line tells no step."""
    allocated: array[float] = field(default_factory=_numbers)
    """Bytes at the end of a step, or at its peak where that is all a framework prints."""
    peak: array[float] = field(default_factory=_numbers)
    """Largest so far: most frameworks never reset it."""
    reserved: array[float] = field(default_factory=_numbers)
    rate_steps: array[int] = field(default_factory=_steps)
    rates: array[float] = field(default_factory=_numbers)
    """Tokens/s of each GPU, where a framework prints those instead of times."""
    timer_steps: dict[str, array[int]] = field(default_factory=dict)
    """Timer -> steps for which it is printed."""
    timers_s: dict[str, array[float]] = field(default_factory=dict)
    """Timer -> seconds, parallel to ``timer_steps``."""

    def add_timer(self, name: str, step: int, seconds: float) -> None:
        """Append what a framework's own timer says of a step."""
        if name not in self.timers_s:
            if len(self.timers_s) >= MAX_TIMERS:
                return
            self.timer_steps[name], self.timers_s[name] = _steps(), _numbers()
        self.timer_steps[name].append(step)
        self.timers_s[name].append(seconds)

    @property
    def last_step(self) -> int | None:
        """The last step that a line tells, or None."""
        ends = [steps[-1] for steps in (self.time_steps, self.memory_steps) if steps]
        return max((end for end in ends if end >= 0), default=None)

    @property
    def lines(self) -> int:
        """Lines read."""
        return len(self.time_steps) + len(self.memory_steps)


@dataclass(slots=True)
class History:
    """All ranks; key None: lines that do not tell whose they are."""

    ranks: dict[int | None, RankHistory] = field(default_factory=dict)
    lines: int = 0
    """Iteration and memory lines read."""
    formats: dict[str, int] = field(default_factory=dict)
    """Family of lines -> how many."""
    total_steps: int | None = None
    """Steps the job was to make, where a line tells."""

    def of(self, rank: int | None) -> RankHistory:
        """Return the rank's history, new when it has none."""
        found = self.ranks.get(rank)
        if found is None:
            if len(self.ranks) >= MAX_RANKS:
                return self.ranks[next(iter(self.ranks))]
            found = self.ranks[rank] = RankHistory()
        return found

    def count(self, family: str, lines: int) -> None:
        """Note that lines of a family were read."""
        self.lines += lines
        self.formats[family] = self.formats.get(family, 0) + lines
        if not self.formats[family]:
            del self.formats[family]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory that grows while the work stays the same."""

    rank: int | None
    counter: str
    first_step: int
    last_step: int
    first_bytes: int
    last_bytes: int
    bytes_per_step: float
    rising_share: float
    """Part of the consecutive blocks of lines in which it rose."""


_MIN_LINES = 8
_BLOCKS = 8
_MIN_SHARE = 0.03
"""A growth of less than 3 % over the run is no leak worth the name."""


def growth_of(rank: int | None, history: RankHistory) -> Growth | None:
    """Return how memory grows after the first steps, or None when it does not.

    Medians of eight blocks of lines: it grows when at least six of seven steps between them rise
    and the whole rise is at least 3 %. A plateau (a late peak, a longer batch) is no growth.
    """
    for counter in ("allocated", "reserved", "peak"):
        points = [
            (step, value)
            for step, value in zip(history.memory_steps, getattr(history, counter), strict=True)
            if value == value  # not NaN  # noqa: PLR0124
        ][1:]
        if len(points) < _MIN_LINES:
            continue
        found = _growth(rank, counter, points)
        if found is not None:
            return found
    return None


def _growth(rank: int | None, counter: str, points: list[tuple[int, float]]) -> Growth | None:
    size = len(points) / _BLOCKS
    blocks = [points[int(i * size) : max(int((i + 1) * size), int(i * size) + 1)] for i in range(8)]
    levels = [median(value for _, value in block) for block in blocks]
    rises = sum(b > a for a, b in pairwise(levels))
    if rises < _BLOCKS - 2 or levels[0] <= 0 or levels[-1] < levels[0] * (1 + _MIN_SHARE):
        return None
    # one jump is a longer batch or a checkpoint, not a growth
    largest = max(b - a for a, b in pairwise(levels))
    if largest > 0.6 * (levels[-1] - levels[0]):
        return None
    first, last = points[0], points[-1]
    steps = max(last[0] - first[0], 1) if last[0] >= 0 else len(points)
    return Growth(
        rank=rank,
        counter=counter,
        first_step=first[0],
        last_step=last[0],
        first_bytes=round(levels[0]),
        last_bytes=round(levels[-1]),
        bytes_per_step=(levels[-1] - levels[0]) / steps,
        rising_share=rises / (_BLOCKS - 1),
    )


def growths(history: History) -> Iterator[Growth]:
    """Yield the growth of every rank that grows."""
    for rank, one in sorted(
        history.ranks.items(), key=lambda item: (item[0] is None, item[0] or 0)
    ):
        found = growth_of(rank, one)
        if found is not None:
            yield found
