"""From the values at a design's points to each field's share, in exact fractions.

Let v(S) be the value with the fields S of B set in A, and D = v(all) - v(none). A field's share is
its Shapley value: its effect, averaged over all orders in which the fields can be changed one after
the other. Fields that move nothing at either end drop out; of up to three others every combination
is known, and the value is exact (Shapley, 1953). Of more, the mean of both ends,
(v({i}) - v({}) + v(F) - v(F - {i})) / 2, equals the Shapley value when no three fields interact;
what the shares do not sum up to is the unexplained rest, and is never spread over them.

A point that could not be evaluated is left out: only orders that pass through evaluated points
count, and of two ends the one that is known stands alone (``one_sided``).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from fsdp_doctor.attribution.design import FACTORIAL_LIMIT, Point

Values = Mapping[Point, float | int | Fraction]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one field does to a value."""

    field: int
    value: Fraction | None
    """Its part of the difference; None: it could not be told."""
    first_in: Fraction | None
    """The change when it alone is flipped in A: is it sufficient?"""
    last_out: Fraction | None
    """The change that is missing when it alone is flipped back in B: is it necessary?"""
    one_sided: bool = False
    """Whether only one of the two ends could be evaluated."""

    @property
    def gap(self) -> Fraction:
        """By how much the ends differ: the sum of the field's interactions."""
        if self.first_in is None or self.last_out is None:
            return Fraction(0)
        return self.last_out - self.first_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Interaction:
    """What fields do together beyond the sum of their own effects (Moebius coefficient)."""

    fields: Point
    value: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A difference, divided among fields. Shares and ``rest`` sum up to ``delta`` exactly."""

    delta: Fraction
    shares: tuple[Share, ...]
    """One per field, in their order."""
    rest: Fraction
    interactions: tuple[Interaction, ...]
    """Largest first; of more than three fields that matter only where two or three have a gap."""
    exact: bool
    """Whether the shares are Shapley values over every combination that matters."""


def divide(count: int, values: Values, inert: Collection[int]) -> Division:
    """Divide the difference between the ends among ``count`` fields.

    ``values`` holds the evaluated points, the two ends among them; ``inert`` are the fields that
    move nothing.
    """
    dropped = inert if count > FACTORIAL_LIMIT else ()
    active = [n for n in range(count) if n not in dropped]
    start, end = frozenset[int](), frozenset(active)
    reduced = _without_inert(values, end)
    reduced[start] = Fraction(values[frozenset()])
    reduced[end] = Fraction(values[frozenset(range(count))])
    delta = reduced[end] - reduced[start]
    ends = {n: _ends(n, reduced, start, end) for n in active}
    exact = len(active) <= FACTORIAL_LIMIT
    shapley = _shapley(active, reduced) if exact else None
    shares = []
    for number in range(count):
        if number not in ends:
            zero = Fraction(0)
            shares.append(Share(field=number, value=zero, first_in=zero, last_out=zero))
            continue
        shares.append(_share(number, ends[number], None if shapley is None else shapley[number]))
    rest = delta - sum((s.value for s in shares if s.value is not None), Fraction(0))
    return Division(
        delta=delta,
        shares=tuple(shares),
        rest=rest,
        interactions=tuple(_interactions(active, reduced, shares)),
        exact=shapley is not None,
    )


Ends = tuple[Fraction | None, Fraction | None]


def _without_inert(known: Values, active: Point) -> dict[Point, Fraction]:
    """Return the values by active fields alone, of the points with fewest others flipped."""
    reduced: dict[Point, Fraction] = {}
    for point in sorted(known, key=lambda p: (len(p - active), sorted(p))):
        reduced.setdefault(point & active, Fraction(known[point]))
    return reduced


def _ends(number: int, values: Mapping[Point, Fraction], start: Point, end: Point) -> Ends:
    alone, without = values.get(frozenset([number])), values.get(end - {number})
    first = None if alone is None else alone - values[start]
    last = None if without is None else values[end] - without
    return first, last


def _share(number: int, ends: Ends, shapley: Fraction | None) -> Share:
    first, last = ends
    known = [value for value in ends if value is not None]
    mean = sum(known, Fraction(0)) / len(known) if known else None
    return Share(
        field=number,
        value=mean if shapley is None else shapley,
        first_in=first,
        last_out=last,
        one_sided=len(known) == 1,
    )


def _shapley(active: Sequence[int], values: Mapping[Point, Fraction]) -> dict[int, Fraction] | None:
    """Return the mean effect of each field over all orders whose points are known; None: none is.

    Orders through a point that could not be evaluated do not count (Faigle and Kern, 1992: games
    under precedence constraints); the values still sum up to the difference.
    """
    sums = dict.fromkeys(active, Fraction(0))
    orders = 0
    for order in itertools.permutations(active):
        points = [frozenset(order[:n]) for n in range(len(order) + 1)]
        if not all(point in values for point in points):
            continue
        orders += 1
        for number, (before, after) in zip(order, itertools.pairwise(points), strict=True):
            sums[number] += values[after] - values[before]
    return {number: value / orders for number, value in sums.items()} if orders else None


def _interactions(
    active: Sequence[int], values: Mapping[Point, Fraction], shares: Sequence[Share]
) -> Iterable[Interaction]:
    """Return the interactions that the known points settle, largest first."""
    found = []
    for size in (2, 3):
        for fields in itertools.combinations(active, size):
            value = _moebius(frozenset(fields), values)
            if value:
                found.append(Interaction(fields=frozenset(fields), value=value))
    if len(active) > FACTORIAL_LIMIT:
        known = {i.fields for i in found}
        found += [i for i in _from_gaps(active, shares) if i.fields not in known]
    return sorted(found, key=lambda i: (-abs(i.value), sorted(i.fields)))


def _moebius(fields: Point, values: Mapping[Point, Fraction]) -> Fraction | None:
    total = Fraction(0)
    for size in range(len(fields) + 1):
        for part in itertools.combinations(sorted(fields), size):
            value = values.get(frozenset(part))
            if value is None:
                return None
            total += value if (len(fields) - size) % 2 == 0 else -value
    return total


def _from_gaps(active: Sequence[int], shares: Sequence[Share]) -> Iterable[Interaction]:
    """Solve pairs from the gaps of the ends, assuming that no three fields interact.

    A field's gap is the sum of its pairs. Two fields with a gap are the pair; of three,
    m_ij = (gap_i + gap_j - gap_k) / 2. With more the pairs are not determined.
    """
    gaps = {n: shares[n].gap for n in active if shares[n].gap}
    if len(gaps) == 2:
        (i, x), (j, y) = gaps.items()
        if x == y:
            yield Interaction(fields=frozenset([i, j]), value=x)
    elif len(gaps) == 3:
        for i, j in itertools.combinations(gaps, 2):
            (k,) = gaps.keys() - {i, j}
            value = (gaps[i] + gaps[j] - gaps[k]) / 2
            if value:
                yield Interaction(fields=frozenset([i, j]), value=value)


def whole_numbers(parts: Sequence[Fraction], total: int) -> tuple[list[int], int]:
    """Round parts to whole numbers, each by less than one; return them and the rest of ``total``.

    The roundings sum up to at most a half, so that parts which sum up to a whole number still do
    (largest remainder method).
    """
    floors = [part.numerator // part.denominator for part in parts]
    exact = sum(parts, Fraction(0))
    missing = round(exact) - sum(floors)
    order = sorted(range(len(parts)), key=lambda n: (floors[n] - parts[n], n))
    for number in order[:missing]:
        floors[number] += 1
    return floors, total - sum(floors)
