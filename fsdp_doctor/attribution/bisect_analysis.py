"""The numbers of a search by re-runs: shares with their noise, what is firm, the smallest set."""

from __future__ import annotations

import math
from fractions import Fraction

from fsdp_doctor.attribution.bisect import TIGHT, Search
from fsdp_doctor.attribution.design import Point
from fsdp_doctor.attribution.shares import Division, Share, divide
from fsdp_doctor.attribution.statistics import ALPHA, CLAIM_FLOOR, memory_threshold
from fsdp_doctor.model.bisect import (
    BisectInteraction,
    BisectShare,
)

EXPLAINS = 0.95
"""Share of the change from which a set of fields explains it."""
RERUN_BOTH_WAYS, RERUN_ONE_WAY = 3, 2


class Analysis:
    """The numbers of a search over a metric. Both ends are known."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self.timed = search.metric == "step_time_s"
        self.values = {
            point: value for point in search.outcomes if (value := search.value(point)) is not None
        }
        self.inert = search.design.inert(self.values, search.moved)
        self.division = self._divide(self.values)
        self._sigma, self._freedom = self._pooled()

    def _divide(self, values: dict[Point, float]) -> Division:
        return divide(self._search.design.count, values, self.inert)

    # -- noise --------------------------------------------------------------------------------

    def _pooled(self) -> tuple[float, int]:
        """Return the standard deviation between launches (log), pooled, and its freedom."""
        squares, freedom = 0.0, 0
        for point in self.values:
            samples = self._search.samples(point)
            mean = sum(samples) / len(samples)
            squares += sum((x - mean) ** 2 for x in samples)
            freedom += len(samples) - 1
        if not self.timed or not freedom:
            return 0.0, 0
        return max(math.sqrt(squares / freedom), CLAIM_FLOOR), freedom

    def _half(self, weights: dict[Point, float], *, tests: int = 1) -> float | None:
        """Return half of the 95 % interval of a weighted sum of points; None: exact.

        ``tests``: how many such claims are made together (Bonferroni).
        """
        if not self.timed:
            return None
        if not self._freedom:
            return math.inf
        from scipy.special import stdtrit

        variance = 0.0
        for point, weight in weights.items():
            launches = len(self._search.samples(point))
            variance += (weight * self.values[point] * self._sigma) ** 2 / launches
        return float(stdtrit(self._freedom, 1 - ALPHA / tests / 2)) * math.sqrt(variance)

    def _weights(self, number: int) -> dict[Point, float]:
        """Return how much each point counts in a share, which is linear in the values."""
        found = {}
        for point in self.values:
            unit = {p: float(p == point) for p in self.values}
            share = self._divide(unit).shares[number]
            if share.value:
                found[point] = float(share.value)
        return found

    # -- answers ------------------------------------------------------------------------------

    @property
    def delta(self) -> float:
        """The change from A to B."""
        return float(self.division.delta)

    def delta_half(self) -> float | None:
        """Return half of the interval of the change."""
        start, end = self._search.design.ends
        return self._half({start: -1.0, end: 1.0})

    def is_clear(self) -> bool:
        """Return whether A and B differ at all."""
        half = self.delta_half()
        if half is not None:
            return abs(self.delta) > half
        start = self._search.design.ends[0]
        return abs(self.delta) >= memory_threshold(int(self.values[start]))

    def is_tight(self) -> bool:
        """Return whether every share is known well enough, or that there is nothing to share."""
        if not self.timed:
            return True
        wanted = TIGHT * abs(self.delta)
        halves = [self._half(self._weights(s.field)) for s in self.division.shares]
        return all(half is not None and half <= wanted for half in halves)

    def shares(self) -> list[BisectShare]:
        """Return every field's share, largest first."""
        order = sorted(self.division.shares, key=lambda s: (-abs(s.value or 0), s.field))
        return [self._share(share) for share in order]

    def _share(self, share: Share) -> BisectShare:
        number = share.field
        value = number_of(share.value)
        first, last = number_of(share.first_in), number_of(share.last_out)
        half = self._half(self._weights(number))
        interval = None if half is None or value is None else (value - half, value + half)
        delta = self.delta
        clear = self.is_clear() and (interval is None or interval[0] > 0 or interval[1] < 0)
        start, end = self._search.design.ends
        alone = self._search.design.first_in([number])
        without = self._search.design.last_out([number])
        firm = (
            clear and self._is_firm(first, (start, alone)),
            clear and self._is_firm(last, (without, end)),
        )
        return BisectShare(
            keys=self._search.flips.atoms[number].keys,
            value=value,
            share=value / delta if value is not None and delta else None,
            interval=interval,
            first_in=first,
            last_out=last,
            sufficient=firm[0] and self._explains(first, (start, alone)),
            necessary=firm[1] and last is not None and last / delta >= 1 - EXPLAINS,
            interacts_with=self._partners(number),
            level=(None, RERUN_ONE_WAY, RERUN_BOTH_WAYS)[sum(firm)],
            rests_on=self._rests_on(number),
        )

    def _is_firm(self, effect: float | None, ends: tuple[Point, Point]) -> bool:
        """Return whether the effect between two points is more than noise, or than what is called
        the same. Every field has two such effects, and all are judged together.
        """
        if effect is None:
            return False
        if not self.timed:
            return abs(effect) >= memory_threshold(int(self.values[self._search.design.ends[0]]))
        half = self._between(ends, tests=2 * self._search.design.count)
        return half is not None and abs(effect) > half

    def _between(self, ends: tuple[Point, Point], *, tests: int = 1) -> float | None:
        """Return half of the interval of the difference of two points; of points that were not run
        themselves (but equal ones without harmless fields) that of the whole change.
        """
        if any(point not in self.values for point in ends):
            ends = self._search.design.ends
        return self._half({ends[0]: -1.0, ends[1]: 1.0}, tests=tests)

    def _explains(self, effect: float | None, ends: tuple[Point, Point]) -> bool:
        """Return whether an effect is 95 % of the change, or no less as far as noise lets tell."""
        if effect is None or not self.delta:
            return False
        sign = 1 if self.delta > 0 else -1
        half = self._between(ends) or 0.0
        return sign * effect > half and sign * effect + half >= EXPLAINS * abs(self.delta)

    def _partners(self, number: int) -> tuple[str, ...]:
        fields = {n for i in self._told() if number in i for n in i} - {number}
        return tuple(key for n in sorted(fields) for key in self._search.flips.atoms[n].keys)

    def _told(self) -> list[Point]:
        return [i.fields for i in self.division.interactions if self._matters(i.value)]

    def _matters(self, value: Fraction) -> bool:
        """Return whether an interaction is worth telling: of four noisy times or more, it has to
        exceed the interval of the change, which has two, by the root of 2.
        """
        if self.timed:
            half = self.delta_half()
            return half is not None and abs(float(value)) > math.sqrt(2) * half
        return abs(value) >= memory_threshold(int(self.values[self._search.design.ends[0]]))

    def interactions(self) -> list[BisectInteraction]:
        """Return what fields do together beyond the sum of what each does alone."""
        return [
            BisectInteraction(
                keys=self._search.flips.keys_of(i.fields), value=number_of(i.value) or 0.0
            )
            for i in self.division.interactions
            if self._matters(i.value)
        ]

    def _rests_on(self, number: int) -> tuple[str, ...]:
        design = self._search.design
        wanted = {design.first_in([number]), design.last_out([number]), *design.ends}
        ids = point_ids(self._search)
        return tuple(ids[p] for p in self.values if self.division.exact or p in wanted)

    def smallest_set(self) -> tuple[Point, float] | None:
        """Return the fewest fields that make 95 % of the change, and what they make of it.

        Fields that move nothing do not matter, so a point stands for itself without them.
        """
        if not self.is_clear():
            return None
        start = self._search.design.ends[0]
        active = frozenset(range(self._search.design.count)) - self.inert
        reached: dict[Point, float] = {}
        for point, value in self.values.items():
            effect = value - self.values[start]
            if point & active and self._explains(effect, (start, point)):
                reached.setdefault(point & active, effect / self.delta)
        if not reached:
            return None
        best = min(reached, key=lambda p: (len(p), -reached[p], sorted(p)))
        return best, reached[best]


def number_of(value: Fraction | None) -> float | None:
    """Return an exact value as a number: whole ones as int."""
    if value is None:
        return None
    return float(value) if value.denominator != 1 else int(value)


def point_ids(search: Search) -> dict[Point, str]:
    """Return the names of the evaluated points."""
    return {point: f"P{number}" for number, point in enumerate(search.outcomes)}
