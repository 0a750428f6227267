"""Ranks that are slower than their peers."""

import numpy as np
import pytest
from builders import make_diff, make_rank, make_run

from fsdp_doctor.attribution.compare import compare_with_diff
from fsdp_doctor.attribution.stragglers import find_stragglers, flag


def own_times(rng, ranks, steps, *, slow=None, by=0.05):
    """Return own times, rank x step, with 1 % noise and one slow rank."""
    own = 0.1 * np.exp(rng.normal(0, 0.01, (ranks, steps)))
    if slow is not None:
        own[slow] *= 1 + by
    return own


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_equal_ranks_are_not_flagged(ranks):
    """At most 2 % of healthy jobs have a straggler by chance."""
    rng = np.random.default_rng(0)
    flagged = [flag(own_times(rng, ranks, 15), ranks=range(ranks)) for _ in range(100)]
    assert sum(bool(found) for found in flagged) <= 2


@pytest.mark.parametrize("ranks", [2, 8])
def test_five_percent_is_found(ranks):
    """A rank 5 % late is found in at least 90 % of jobs, also with two ranks, and named alone."""
    rng = np.random.default_rng(1)
    hits = [flag(own_times(rng, ranks, 20, slow=1), ranks=range(ranks)) for _ in range(100)]
    assert sum([s.rank for s in found] == [1] for found in hits) >= 90


def test_a_late_rank_below_three_percent_is_not_reported():
    """A rank that is always last, but by 1 %, is no straggler."""
    own = np.full((4, 20), 0.1)
    own[2] *= 1.01
    assert flag(own, ranks=range(4)) == []


def test_lone_ranks_have_no_peers():
    """One rank cannot be a straggler."""
    assert flag(np.full((1, 10), 0.1), ranks=[0]) == []
    assert find_stragglers([make_run(world_size=1, times=[0.1] * 10)]) == []


def slow_data_run(slow):
    """Return a run of four ranks of which one loads data 20 ms longer per step of 100 ms."""
    return make_run(
        ranks=[
            make_rank(
                rank,
                times=[0.1] * 12,
                phase_times={"data": [0.025 if rank == slow else 0.005] * 12},
            )
            for rank in range(4)
        ],
        world_size=4,
    )


def test_slow_data_loading_of_one_rank_is_a_finding():
    """The rank, how late it is and what it costs are told; no flag is blamed."""
    result = compare_with_diff([slow_data_run(None)], [slow_data_run(3)], make_diff())
    (finding,) = [f for f in result.findings if f.cause == "straggler"]
    assert finding.claim.startswith("rank 3 of B is slower than its peers by 25.0 %")
    assert finding.evidence[0].rank == 3
    assert (finding.severity, finding.flags) == ("warning", ())


def test_a_straggler_on_both_sides_is_only_noted():
    """It was there before, so it does not explain a regression."""
    result = compare_with_diff([slow_data_run(3)], [slow_data_run(3)], make_diff())
    (finding,) = [f for f in result.findings if f.cause == "straggler"]
    assert finding.severity == "note"


def test_the_optimizer_counts_only_without_clipping():
    """Clipping makes ranks wait for each other in the optimizer, so it is no local phase then."""

    def run(**config):
        ranks = [
            make_rank(
                rank,
                times=[0.1] * 12,
                phase_times={"optimizer": [0.03 if rank == 1 else 0.01] * 12},
            )
            for rank in range(2)
        ]
        return make_run(ranks=ranks, config=config)

    assert [s.rank for s in find_stragglers([run()])] == [1]
    assert find_stragglers([run(**{"optimizer.max_grad_norm": 1.0})]) == []


def test_the_optimizer_does_not_count_with_a_gradient_scaler():
    """Its check for overflow goes over all ranks, in the optimizer phase."""
    late = {"phase_times": {"optimizer": [0.03] * 12}, "times": [0.1] * 12}
    fast = {"phase_times": {"optimizer": [0.01] * 12}, "times": [0.1] * 12}
    ranks = [make_rank(0, **fast), make_rank(1, **late)]
    assert find_stragglers([make_run(ranks=ranks, config={"precision.grad_scaler": False})])
    assert not find_stragglers([make_run(ranks=ranks, config={"precision.grad_scaler": True})])
