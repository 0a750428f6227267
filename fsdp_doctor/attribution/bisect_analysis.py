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

    def _half(self, weights: dict[Point, float]) -> float | None:
        """Return half of the 95 % interval of a weighted sum of points; None: exact."""
        if not self.timed:
            return None
        if not self._freedom:
            return math.inf
        from scipy.special import stdtrit

        variance = 0.0
        for point, weight in weights.items():
            launches = len(self._search.samples(point))
            variance += (weight * self.values[point] * self._sigma) ** 2 / launches
        return float(stdtrit(self._freedom, 1 - ALPHA / 2)) * math.sqrt(variance)

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
        clear, delta = self.is_clear(), self.delta
        firm = [clear and self._is_firm(number, end) for end in (first, last)]
        return BisectShare(
            keys=self._search.flips.atoms[number].keys,
            value=value,
            share=value / delta if value is not None and delta else None,
            interval=interval,
            first_in=first,
            last_out=last,
            sufficient=firm[0] and _reaches(first, delta, EXPLAINS),
            necessary=firm[1] and _reaches(last, delta, 1 - EXPLAINS),
            interacts_with=self._partners(number),
            level=(None, RERUN_ONE_WAY, RERUN_BOTH_WAYS)[sum(firm)],
            rests_on=self._rests_on(number),
        )

    def _is_firm(self, number: int, effect: float | None) -> bool:
        """Return whether an end's effect is more than noise, or than what is called the same."""
        if effect is None:
            return False
        design = self._search.design
        start, end = design.ends
        if not self.timed:
            return abs(effect) >= memory_threshold(int(self.values[start]))
        alone, without = design.first_in([number]), design.last_out([number])
        pair = (alone, start) if alone in self.values else (end, without)
        if any(point not in self.values for point in pair):
            return False
        half = self._half({pair[0]: 1.0, pair[1]: -1.0})
        return half is not None and abs(effect) > half

    def _partners(self, number: int) -> tuple[str, ...]:
        fields = {n for i in self._told() if number in i for n in i} - {number}
        return tuple(key for n in sorted(fields) for key in self._search.flips.atoms[n].keys)

    def _told(self) -> list[Point]:
        return [i.fields for i in self.division.interactions if self._matters(i.value)]

    def _matters(self, value: Fraction) -> bool:
        """Return whether an interaction is worth telling (times are noisy: 10 % of the change)."""
        if self.timed:
            return abs(float(value)) >= 0.1 * abs(self.delta) and self.is_clear()
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
        start = self.values[self._search.design.ends[0]]
        active = frozenset(range(self._search.design.count)) - self.inert
        reached: dict[Point, float] = {}
        for point, value in self.values.items():
            share = (value - start) / self.delta
            if share >= EXPLAINS:
                reached.setdefault(point & active, share)
        if not reached:
            return None
        best = min(reached, key=lambda p: (len(p), -reached[p], sorted(p)))
        return best, reached[best]


def number_of(value: Fraction | None) -> float | None:
    """Return an exact value as a number: whole ones as int."""
    if value is None:
        return None
    return float(value) if value.denominator != 1 else int(value)


def _reaches(effect: float | None, delta: float, share: float) -> bool:
    return effect is not None and delta != 0 and effect / delta >= share


def point_ids(search: Search) -> dict[Point, str]:
    """Return the names of the evaluated points."""
    return {point: f"P{number}" for number, point in enumerate(search.outcomes)}
