"""Designs of experiments and the shares that follow from them."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_doctor.attribution.design import Design, run_design
from fsdp_doctor.attribution.shares import divide, whole_numbers

SIZES = st.integers(-(1 << 40), 1 << 40)


def subsets(fields):
    """Return every subset."""
    return [
        frozenset(part)
        for size in range(len(fields) + 1)
        for part in itertools.combinations(sorted(fields), size)
    ]


def evaluated(design, value):
    """Run a design on ``value(point)``; return the division and the number of points."""
    known = {}

    def moved(x, y):
        return None if known[x] is None or known[y] is None else known[x] != known[y]

    def evaluate(points):
        for point in points:
            assert point not in known
            known[point] = value(point)

    run_design(design, known, moved, evaluate)
    values = {point: found for point, found in known.items() if found is not None}
    return divide(design.count, values, design.inert(known, moved)), len(known)


def shapley(fields, value):
    """Return Shapley values by their definition, over all subsets."""
    found = {}
    n = len(fields)
    for i in fields:
        total = Fraction(0)
        for part in subsets(set(fields) - {i}):
            weight = Fraction(
                math.factorial(len(part)) * math.factorial(n - len(part) - 1), math.factorial(n)
            )
            total += weight * (value(part | {i}) - value(part))
        found[i] = total
    return found


def test_what_another_field_cannot_do_without_is_that_fields():
    """Fields 1 and 2 do nothing and 0 cannot run without them: 0 and 3 share as two alone do."""

    def value(point):
        if 0 in point and not {1, 2} <= point:
            return None
        return 10 * (0 in point) + 3 * (3 in point) + 4 * (0 in point and 3 in point)

    division, _ = evaluated(Design(count=4), value)
    assert [share.value for share in division.shares] == [12, 0, 0, 5]
    assert division.exact
    assert division.rest == 0


@st.composite
def games(draw, smallest=1, largest=10, actives=3):
    """A number of fields, those that matter, and any values over the subsets of these."""
    count = draw(st.integers(smallest, largest))
    active = draw(st.sets(st.integers(0, count - 1), max_size=actives))
    table = {part: draw(SIZES) for part in subsets(active)}
    return count, active, lambda point: table[frozenset(point) & frozenset(active)]


@settings(max_examples=60, deadline=None)
@given(games(), st.booleans())
def test_shares_and_rest_sum_up_to_the_difference(game, folded):
    """Shares and the rest sum up to the difference exactly, whatever interacts."""
    count, active, value = game
    presumed = frozenset(range(count)) - active if folded else frozenset()
    division, _ = evaluated(Design(count=count, presumed_inert=presumed), value)
    full = frozenset(range(count))
    assert division.delta == value(full) - value(frozenset())
    assert sum(share.value for share in division.shares) + division.rest == division.delta


@settings(max_examples=60, deadline=None)
@given(games(smallest=4, largest=12, actives=6))
def test_a_field_that_never_matters_gets_nothing(game):
    """A field without effect gets a share of 0 and takes part in no interaction."""
    count, active, value = game
    division, _ = evaluated(Design(count=count), value)
    for number in set(range(count)) - active:
        assert division.shares[number].value == 0
        assert all(number not in found.fields for found in division.interactions)


@settings(max_examples=50, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=12))
def test_additive_effects_are_recovered(effects):
    """Where fields add up, each share is the field's own effect and nothing is left."""
    division, _ = evaluated(Design(count=len(effects)), lambda p: sum(effects[n] for n in p))
    assert [share.value for share in division.shares] == effects
    assert division.rest == 0
    assert division.interactions == ()


@settings(max_examples=50, deadline=None)
@given(games(smallest=1, largest=3))
def test_up_to_three_fields_shares_are_shapley_values(game):
    """Up to three fields every combination is evaluated and shares equal Shapley's definition."""
    count, _, value = game
    division, points = evaluated(Design(count=count), value)
    expected = shapley(range(count), value)
    assert points == 2**count
    assert {share.field: share.value for share in division.shares} == expected
    assert division.exact


def pairwise(effects, pairs):
    """Return a value without interactions of three fields."""

    def value(point):
        single = sum(effects[n] for n in point)
        return single + sum(size for pair, size in pairs.items() if set(pair) <= point)

    return value


def test_two_ends_are_exact_without_triples():
    """Of five fields that all matter, pairs are divided exactly by 2k + 2 points."""
    value = pairwise([10, 20, 30, 40, 50], {(0, 1): 8, (2, 3): -6})
    division, points = evaluated(Design(count=5), value)
    assert points == 12
    assert not division.exact
    expected = shapley(range(5), value)
    assert {share.field: share.value for share in division.shares} == expected
    assert division.rest == 0


def test_a_triple_among_many_is_left_as_rest():
    """What two ends cannot divide is shown: minus half of a triple, which is never spread."""

    def value(point):
        return sum(100 for _ in point) + (60 if {0, 1, 2} <= point else 0)

    division, _ = evaluated(Design(count=4), value)
    assert division.rest == -30


def test_few_that_matter_among_many_are_exact():
    """Of six fields three matter: both ends are every combination of these, a triple included."""

    def value(point):
        return (60 if {0, 2, 5} <= point else 0) + (9 if 2 in point else 0)

    division, points = evaluated(Design(count=6), value)
    assert points == 14
    assert division.exact
    assert [share.value for share in division.shares] == [20, 0, 29, 0, 0, 20]
    assert division.interactions[0].fields == {0, 2, 5}


@pytest.mark.parametrize("count", [8, 12])
def test_presumed_inert_fields_cost_two_points(count):
    """From eight fields on those presumed harmless cost two points together: here A, B, both ends
    of two fields, and of the group.
    """
    inert = frozenset(range(2, count))
    _, used = evaluated(Design(count=count, presumed_inert=inert), lambda p: len(p - inert))
    assert used == 2 + 4 + 2


def test_a_group_that_moves_something_is_opened():
    """A wrongly presumed field is found by halving its group."""
    design = Design(count=12, presumed_inert=frozenset(range(12)))
    division, used = evaluated(design, lambda p: 5 * (9 in p))
    assert [share.value for share in division.shares] == [5 * (n == 9) for n in range(12)]
    assert used < 2 * 12 + 2


def test_points_that_cannot_run_are_left_out():
    """Two fields that are only valid together after the first: orders through the gap drop out."""

    def value(point):
        return None if point == {1} else 10 * len(point)

    division, _ = evaluated(Design(count=2), value)
    assert [share.value for share in division.shares] == [10, 10]
    assert division.shares[1].one_sided
    assert division.shares[1].first_in is None


def test_nothing_known_between_the_ends_leaves_all_unexplained():
    """When no point between A and B can run, no share is told and all is rest."""
    division, _ = evaluated(Design(count=2), lambda p: None if len(p) == 1 else 10 * len(p))
    assert [share.value for share in division.shares] == [None, None]
    assert division.rest == 20


def test_a_search_can_stop_anywhere_and_go_on():
    """Asking again with what is known asks for the rest only."""
    design = Design(count=5)
    points = design.next_points((), lambda _x, _y: True)
    assert design.next_points(set(points[:4]), lambda _x, _y: True) == points[4:]
    assert design.next_points(set(points), lambda _x, _y: True) == []


@given(st.lists(st.fractions(max_denominator=6), max_size=6))
def test_rounding_keeps_the_sum(parts):
    """Whole numbers differ from their fractions by less than 1 and keep a whole sum."""
    total = round(sum(parts, Fraction(0)))
    rounded, rest = whole_numbers(parts, total)
    assert rest == 0
    assert all(abs(x - y) < 1 for x, y in zip(rounded, parts, strict=True))
