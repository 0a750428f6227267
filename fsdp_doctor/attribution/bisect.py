"""Find by re-runs which changed fields moved a metric, or made a job fail.

The search asks for launches of points (see ``design``) and never starts one itself; a point that
cannot run is an outcome. Memory needs one launch a point. Step time needs at least three,
interleaved over all points, and goes on until every share's interval is tight or the budget is
spent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from fsdp_doctor.attribution.atoms import Flips
from fsdp_doctor.attribution.ddmin import ddmin
from fsdp_doctor.attribution.design import Design, Point
from fsdp_doctor.attribution.observations import Place, observe
from fsdp_doctor.attribution.statistics import MIN_LAUNCHES, memory_threshold
from fsdp_doctor.errors import InputError, ProfileError
from fsdp_doctor.model.bisect import Predicate
from fsdp_doctor.model.run import Run

METRICS = {
    "peak_allocated_bytes": "bytes",
    "peak_reserved_bytes": "bytes",
    "resident_bytes": "bytes",
    "step_time_s": "s",
}
TIGHT = 0.25
"""An interval is tight when half of it is less than this share of the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One launch of a point."""

    run: Run | None = None
    failure: str | None = None
    """Why there is no run, or how it ended."""
    reused: bool = False
    seconds: float = 0.0


class BudgetSpentError(Exception):
    """No launch is left."""


class LaunchPoint(Protocol):
    """Launches a point, or reads its recorded launch again. Raises BudgetSpentError."""

    def __call__(self, point: Point, number: int) -> Outcome:
        """Return the outcome of a point's launch ``number``."""


@dataclass(slots=True)
class Search:
    """What is known of the points, and how to learn more."""

    flips: Flips
    launch: LaunchPoint
    metric: str = "peak_allocated_bytes"
    outcomes: dict[Point, list[Outcome]] = field(default_factory=dict)
    complete: bool = True

    @property
    def design(self) -> Design:
        """Return the design over all changed fields."""
        return Design(count=len(self.flips.atoms), presumed_inert=self.flips.inert)

    # -- what a point came to -----------------------------------------------------------------

    def add(self, point: Point) -> Outcome:
        """Launch a point once more."""
        known = self.outcomes.setdefault(point, [])
        try:
            outcome = self.launch(point, len(known))
        except BudgetSpentError:
            if not known:
                del self.outcomes[point]
            raise
        known.append(outcome)
        return outcome

    def samples(self, point: Point) -> list[float]:
        """Return the metric of each launch that ran to its end: bytes, or the log of step time."""
        found = []
        for outcome in self.outcomes.get(point, ()):
            if outcome.run is not None and outcome.failure is None:
                value = self._value(outcome.run)
                if value is not None:
                    found.append(value)
        return found

    def _value(self, run: Run) -> float | None:
        if self.metric == "step_time_s":
            import numpy as np

            from fsdp_doctor.attribution.times import launch_times

            step = launch_times(run).step
            return float(np.median(np.log(step))) if step.size else None
        observed = observe(run).get(Place(self.metric, None))
        return None if observed is None else observed.value

    def value(self, point: Point) -> float | None:
        """Return the metric of a point: bytes, or seconds; None: it could not run."""
        samples = self.samples(point)
        if not samples:
            return None
        if self.metric == "step_time_s":
            return math.exp(sum(samples) / len(samples))
        return max(samples)

    def failure(self, point: Point) -> str | None:
        """Return why a point could not run."""
        failures = [o.failure for o in self.outcomes.get(point, ()) if o.failure]
        return failures[0] if failures else None

    def moved(self, x: Point, y: Point) -> bool | None:
        """Return whether two points differ by more than is called the same."""
        first, second = self.value(x), self.value(y)
        if first is None or second is None:
            return None
        if self.metric == "step_time_s":
            return True
        return abs(second - first) >= memory_threshold(int(first))

    # -- searches -----------------------------------------------------------------------------

    def run_memory(self) -> None:
        """Launch every point of the design once."""
        try:
            self._ends()
            while missing := self.design.next_points(self.outcomes, self.moved):
                for point in missing:
                    self.add(point)
        except BudgetSpentError:
            self.complete = False

    def run_times(self, is_tight: Callable[[], bool]) -> None:
        """Launch all points in rounds, every other one backwards, until ``is_tight``."""
        points: list[Point] = []
        try:
            rounds = 0
            while rounds < MIN_LAUNCHES or not is_tight():
                if rounds == 0:
                    self._ends()
                    points = self.design.all_points()
                order = points if rounds % 2 == 0 else points[::-1]
                for point in order:
                    if len(self.outcomes.get(point, ())) <= rounds and self._may_run(point):
                        self.add(point)
                rounds += 1
        except BudgetSpentError:
            self.complete = False

    def _may_run(self, point: Point) -> bool:
        return not self.outcomes.get(point) or bool(self.samples(point))

    def _ends(self) -> None:
        """Launch A and B. Raises ProfileError when one fails or has no such number."""
        for name, point in zip("AB", self.design.ends, strict=True):
            if not self.outcomes.get(point):
                self.add(point)
            if self.value(point) is None:
                why = self.failure(point) or f"it recorded no {self.metric}"
                raise ProfileError(
                    f"{name} does not tell {self.metric}: {why} "
                    "(--until completes or --until fits searches for what makes a job fail)"
                )

    def run_predicate(self, until: Predicate) -> Point | None:
        """Return the fewest fields that make A fail as B does; None: the budget was spent.

        Raises InputError when A fails already, or B does not.
        """
        start, end = self.design.ends
        try:
            if self._fails(start, until) is not False:
                raise InputError(f"A does not hold already ({self.failure(start)})", where=until)
            if self._fails(end, until) is not True:
                raise InputError("B holds: there is nothing to search for", where=until)
            found = ddmin(end, lambda point: self._fails(point, until))
            self._fails(end - found, until)
        except BudgetSpentError:
            self.complete = False
            return None
        return found

    def _fails(self, point: Point, until: Predicate) -> bool | None:
        """Return whether a point breaks the predicate; None: it fails otherwise, or is invalid."""
        if not self.outcomes.get(point):
            self.add(point)
        return fails(self.outcomes[point][0], until)


def fails(outcome: Outcome, until: Predicate) -> bool | None:
    """Return whether a launch broke the predicate; None: that cannot be told."""
    if outcome.run is None:
        return None
    failure = outcome.run.manifest.failure
    if failure is None:
        return False
    if until == "completes":
        return True
    return True if failure.kind == "device_oom" else None
