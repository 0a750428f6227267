"""Searches by re-runs, with launches made of arithmetic."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from builders import make_run
from hypothesis import given
from hypothesis import strategies as st

from fsdp_doctor.attribution.atoms import find_flips
from fsdp_doctor.attribution.bisect import BudgetSpentError, Outcome, Search
from fsdp_doctor.attribution.bisect_analysis import Analysis
from fsdp_doctor.attribution.bisect_result import metric_result, predicate_result
from fsdp_doctor.attribution.ddmin import ddmin
from fsdp_doctor.config.diff import diff_configs
from fsdp_doctor.config.resolvers.torch import resolve_spec
from fsdp_doctor.config.spec import apply_overrides, spec_from_mapping
from fsdp_doctor.errors import InputError, ProfileError
from fsdp_doctor.model.run import Failure
from fsdp_doctor.report.bisect_document import render_bisection

MIB = 1 << 20
A = spec_from_mapping({"name": "a", "world_size": 2, "config": {"strategy": "fsdp2"}}, "test")
CHANGES = {
    "batch.micro": "workload.micro_batch=2",
    "batch.seq_len": "workload.sequence_length=256",
    "recompute.mode": "config.activation_checkpointing.mode=full",
    "sharding.reshard_after_forward": "config.fsdp2.reshard_after_forward=false",
    "optimizer.kind": "config.optimizer.name=sgd",
    "optimizer.grad_clip": "config.optimizer.max_grad_norm=1.0",
}


def flips_of(count):
    """Return A and A with the first ``count`` changes."""
    b = apply_overrides(A, ["name=b", *list(CHANGES.values())[:count]])
    found = find_flips(A, b, diff_configs(resolve_spec(A), resolve_spec(b)))
    assert len(found.atoms) == count
    return found


class Launches:
    """Launches whose peak, failure or step time follows from the flipped fields."""

    def __init__(self, flips, outcome, *, budget=None):
        self.flips, self.outcome, self.budget = flips, outcome, budget
        self.made = []

    def __call__(self, point, number):
        """Return the outcome of a point."""
        if self.budget is not None and len(self.made) >= self.budget:
            raise BudgetSpentError
        self.made.append(point)
        keys = frozenset(self.flips.keys_of(point))
        return self.outcome(keys)


def peak(mib):
    """Return a launch that held so much."""
    size = {"activations": mib * MIB}
    return Outcome(run=make_run(peaks={"forward": size}))


def failed(kind):
    """Return a launch that failed."""
    failure = Failure(kind=kind, message="no")
    return Outcome(run=make_run(failure=failure), failure=f"{kind}: no")


def searched(count, outcome, **more):
    """Search over the first ``count`` changes."""
    flips = flips_of(count)
    launches = Launches(flips, outcome, **more)
    return Search(flips=flips, launch=launches), launches


def test_an_interaction_of_two_among_five_fields():
    """Batch and sequence multiply, the others do nothing: both are needed, neither suffices."""

    def outcome(keys):
        batch = 2 if "batch.micro" in keys else 1
        length = 2 if "batch.seq_len" in keys else 1
        return peak(100 * batch * length)

    search, launches = searched(5, outcome)
    search.run_memory()
    found = metric_result(search, ("a", "b"), 1.0)
    assert len(launches.made) == len(set(launches.made)) == 12
    shares = {s.keys: s for s in found.shares}
    assert found.delta == 300 * MIB
    for key in ("batch.micro", "batch.seq_len"):
        share = shares[(key,)]
        assert (share.value, share.first_in, share.last_out) == (150 * MIB, 100 * MIB, 200 * MIB)
        assert share.necessary
        assert not share.sufficient
        assert share.level == 3
    assert shares[("recompute.mode",)].value == 0
    assert shares[("recompute.mode",)].level is None
    assert [(i.keys, i.value) for i in found.interactions] == [
        (("batch.micro", "batch.seq_len"), 100 * MIB)
    ]
    assert found.smallest_set == ("batch.micro", "batch.seq_len")
    assert found.rest == 0


def test_one_guilty_field_is_sufficient_and_necessary():
    """A field that does all of it alone is both, and the smallest set."""
    search, _ = searched(4, lambda keys: peak(500 if "recompute.mode" in keys else 100))
    search.run_memory()
    found = metric_result(search, ("a", "b"), 1.0)
    assert found.smallest_set == ("recompute.mode",)
    best = found.shares[0]
    assert best.sufficient
    assert best.necessary
    assert best.share == 1


def test_points_that_cannot_run_are_outcomes():
    """Points that run out of memory leave one-sided shares and no traceback."""

    def outcome(keys):
        if "batch.micro" in keys and "batch.seq_len" not in keys:
            return failed("device_oom")
        return peak(100 + 50 * ("batch.micro" in keys) + 7 * ("batch.seq_len" in keys))

    search, _ = searched(4, outcome)
    search.run_memory()
    found = metric_result(search, ("a", "b"), 1.0)
    share = next(s for s in found.shares if s.keys == ("batch.micro",))
    assert share.value == 50 * MIB
    assert share.first_in is None
    assert share.level == 2
    assert [p.failure for p in found.points if p.failure] == ["device_oom: no"] * 2


def test_an_end_that_fails_names_the_predicate():
    """When B itself has no number, the error says which search does help."""
    search, _ = searched(2, lambda keys: failed("device_oom") if keys else peak(100))
    with pytest.raises(ProfileError, match="--until"):
        search.run_memory()


def test_a_spent_budget_is_told_and_gone_on_from():
    """What is known is told; the next call launches only the rest."""
    flips = flips_of(4)

    def outcome(keys):
        return peak(100 + 50 * ("batch.micro" in keys))

    first = Search(flips=flips, launch=Launches(flips, outcome, budget=4))
    first.run_memory()
    assert not first.complete
    assert "call again" in metric_result(first, ("a", "b"), 1.0).warnings[0]
    launches = Launches(flips, outcome)
    second = Search(flips=flips, launch=launches, outcomes=dict(first.outcomes))
    second.run_memory()
    assert second.complete
    assert len(launches.made) == 6


def test_step_time_is_interleaved_until_tight():
    """A 40 % slowdown by one of three fields is found among launches that differ by 2 %."""
    chance = random.Random(3)

    def outcome(keys):
        base = 0.14 if "batch.seq_len" in keys else 0.1
        times = [base * math.exp(chance.gauss(0, 0.02))] * 12
        return Outcome(run=make_run(times=times))

    flips = flips_of(3)
    launches = Launches(flips, outcome)
    search = Search(flips=flips, launch=launches, metric="step_time_s")
    search.run_times(lambda: Analysis(search).is_tight())
    found = metric_result(search, ("a", "b"), 1.0)
    rounds = len(launches.made) // 8
    assert rounds >= 3
    assert launches.made[8:16] == launches.made[2:8][::-1] + launches.made[:2][::-1]
    assert found.smallest_set == ("batch.seq_len",)
    best = found.shares[0]
    assert best.keys == ("batch.seq_len",)
    assert best.interval[0] <= 0.04 <= best.interval[1]
    assert all(s.level is None or s is best for s in found.shares)


def test_equal_times_blame_nothing():
    """Of launches that differ by noise alone nothing is blamed, whatever the budget."""
    chance = random.Random(5)

    def outcome(_keys):
        return Outcome(run=make_run(times=[0.1 * math.exp(chance.gauss(0, 0.1))] * 12))

    flips = flips_of(2)
    search = Search(flips=flips, launch=Launches(flips, outcome, budget=20), metric="step_time_s")
    search.run_times(lambda: Analysis(search).is_tight())
    found = metric_result(search, ("a", "b"), 1.0)
    assert found.smallest_set is None
    assert {s.level for s in found.shares} == {None}


def test_until_fits_finds_the_smallest_failing_set():
    """Of six fields two together run out of memory; one combination hangs and tells nothing."""

    def outcome(keys):
        if {"batch.micro", "optimizer.kind"} <= keys:
            return failed("device_oom")
        return failed("hang") if keys == {"recompute.mode"} else peak(100)

    search, launches = searched(6, outcome)
    guilty = search.run_predicate("fits")
    found = predicate_result(search, "fits", guilty, ("a", "b"), 1.0)
    assert found.smallest_set == ("batch.micro", "optimizer.kind")
    assert {s.level for s in found.shares} == {3}
    assert len(launches.made) == len(set(launches.made)) < 40


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (lambda _keys: peak(1), "B holds"),
        (lambda _keys: failed("device_oom"), "A does not hold"),
    ],
    ids=["both-hold", "both-fail"],
)
def test_a_predicate_must_hold_in_a_and_not_in_b(outcome, why):
    """Otherwise there is nothing to search for, and the error says so."""
    search, _ = searched(2, outcome)
    with pytest.raises(InputError, match=why):
        search.run_predicate("fits")


@given(st.sets(st.integers(0, 9), min_size=1, max_size=4), st.integers(5, 10))
def test_ddmin_finds_exactly_the_guilty_ones(guilty, count):
    """When a set of changes fails if and only if it holds the guilty ones, these are found."""
    wanted = frozenset(n for n in guilty if n < count) or frozenset([0])
    found = ddmin(frozenset(range(count)), lambda point: wanted <= point)
    assert found == wanted


@given(st.integers(2, 6), st.randoms(use_true_random=False))
def test_ddmin_is_1_minimal(count, chance):
    """Whatever fails, without any one of its changes the answer does not fail."""
    every = frozenset(range(count))
    points = [frozenset(c) for n in range(count) for c in itertools.combinations(range(count), n)]
    failing = {every} | {p for p in points if p and chance.random() < 0.3}
    found = ddmin(every, lambda point: point in failing)
    assert found in failing
    assert len(found) == 1 or all(found - {n} not in failing for n in found)


@pytest.mark.parametrize("fmt", ["terminal", "markdown", "html", "json"])
def test_reports(fmt):
    """Every report names the smallest set, the interaction and the points."""
    search, _ = searched(4, lambda keys: peak(100 * (1 + ("batch.micro" in keys)) * 2))
    search.run_memory()
    text = render_bisection(metric_result(search, ("a", "b"), 1.0), fmt)
    assert "batch.micro" in text
    assert "P1" in text
