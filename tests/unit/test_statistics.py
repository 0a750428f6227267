"""Statistics of times and bytes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fsdp_doctor.attribution.statistics import (
    TimeTest,
    benjamini_hochberg,
    block_length,
    bootstrap_interval,
    compare_samples,
    exact_verdict,
    hodges_lehmann,
    holm,
    location_shift,
    look,
    memory_threshold,
    range_verdict,
    required_launches,
    time_verdict,
    welch,
)

p_lists = st.lists(st.floats(0, 1), min_size=1, max_size=12)


def launches(rng, count, *, shift=0.0, launch_sd=0.01, step_sd=0.01, steps=20):
    """Return log step times of ``count`` launches that differ by ``launch_sd``."""
    return [
        math.log(0.1) + shift + rng.normal(0, launch_sd) + rng.normal(0, step_sd, steps)
        for _ in range(count)
    ]


def test_welch_equals_scipy():
    """Without a floor, interval and p-value are those of scipy's Welch test."""
    a, b = [0.10, 0.13, 0.11, 0.16], [0.21, 0.18, 0.29]
    ours = welch(a, b)
    theirs = stats.ttest_ind(b, a, equal_var=False)
    interval = theirs.confidence_interval(0.95)
    assert ours.p == pytest.approx(theirs.pvalue)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high))
    assert ours.freedom == pytest.approx(theirs.df)


def test_floor_keeps_lucky_launches_from_a_narrow_interval():
    """Three equal launches a side do not give an interval of width zero."""
    test = welch([1.0, 1.0, 1.0], [1.01, 1.01, 1.01], floor=0.0025)
    assert test.high - test.low > 0.005
    assert welch([1.0, 1.0], [1.0, 1.0]).p == 1.0
    assert welch([1.0, 1.0], [2.0, 2.0]).p == 0.0


@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=8),
    st.lists(st.floats(-5, 5), min_size=1, max_size=8),
)
@settings(deadline=None)
def test_hodges_lehmann_is_the_median_of_all_differences(a, b):
    """The shift equals a brute-force median over every pair."""
    pairs = sorted(y - x for x, y in itertools.product(a, b))
    middle = len(pairs) // 2
    expected = pairs[middle] if len(pairs) % 2 else (pairs[middle - 1] + pairs[middle]) / 2
    assert hodges_lehmann(np.array(a), np.array(b)) == pytest.approx(expected)


def test_bootstrap_interval_is_reproducible_and_covers_the_shift():
    """Equal input gives an equal interval, and it covers a true shift of 5 %."""
    rng = np.random.default_rng(3)
    a, b = rng.normal(0, 0.01, 30), rng.normal(0.05, 0.01, 30)
    low, high = bootstrap_interval(a, b)
    assert (low, high) == bootstrap_interval(a, b)
    assert low < 0.05 < high
    assert high - low < 0.03


def test_long_series_are_compared_by_their_medians():
    """Series of 1000 steps, a million pairs, give the difference of medians."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 0.01, 1000), rng.normal(0.05, 0.01, 1000)
    assert location_shift(a, b) == np.median(b) - np.median(a)
    low, high = bootstrap_interval(a, b)
    assert low < 0.05 < high


def test_blocks_grow_with_autocorrelation():
    """A trending series is resampled in longer blocks than white noise or a constant."""
    noise = np.random.default_rng(0).normal(size=60)
    assert block_length(np.zeros(60)) == 1.0
    assert block_length(np.cumsum(noise)) > block_length(noise) >= 1.0


@given(p_lists)
@settings(deadline=None)
def test_holm_matches_its_definition(p):
    """Holm's adjusted values are the running maximum of (m - i) p(i)."""
    order = np.argsort(p, kind="stable")
    running = np.maximum.accumulate((len(p) - np.arange(len(p))) * np.array(p)[order])
    expected = np.empty(len(p))
    expected[order] = np.minimum(running, 1)
    assert holm(p) == pytest.approx(list(expected))


@given(p_lists)
@settings(deadline=None)
def test_benjamini_hochberg_equals_scipy(p):
    """Benjamini-Hochberg equals scipy's false_discovery_control."""
    assert benjamini_hochberg(p) == pytest.approx(list(stats.false_discovery_control(p)))


def test_no_false_verdict_between_identical_configs():
    """Launches that differ by 1 % noise are called worse or better in at most 1 % of trials."""
    rng = np.random.default_rng(7)
    verdicts = [
        time_verdict(compare_samples(launches(rng, 3), launches(rng, 3))) for _ in range(400)
    ]
    assert sum(v in ("worse", "better") for v in verdicts) <= 4


@pytest.mark.parametrize(("a", "b"), [(3, 3), (3, 5), (5, 3)])
def test_doubled_work_is_always_found(a, b):
    """Twice the time is worse, half the time better, in every one of 100 trials."""
    rng = np.random.default_rng(11)
    for _ in range(100):
        x, y = launches(rng, a), launches(rng, b, shift=math.log(2))
        assert time_verdict(compare_samples(x, y)) == "worse"
        assert time_verdict(compare_samples(y, x)) == "better"


def test_five_percent_is_usually_found():
    """Three launches a side find +5 % at 0.5 % launch noise in at least 95 % of trials."""
    rng = np.random.default_rng(5)
    found = [
        time_verdict(
            compare_samples(
                launches(rng, 3, launch_sd=0.005), launches(rng, 3, shift=0.05, launch_sd=0.005)
            )
        )
        for _ in range(200)
    ]
    assert found.count("worse") >= 190


def test_quiet_equal_launches_are_the_same():
    """Equal configs on a quiet machine are ``same``, which is more than ``unclear``."""
    rng = np.random.default_rng(1)
    x, y = (launches(rng, 3, launch_sd=0.001, step_sd=0.003) for _ in range(2))
    assert time_verdict(compare_samples(x, y)) == "same"


@pytest.mark.parametrize("count", [1, 2])
def test_few_launches_never_give_a_verdict(count):
    """With one or two launches a side even a doubling of time is unclear."""
    rng = np.random.default_rng(2)
    x, y = launches(rng, count), launches(rng, 3, shift=math.log(2))
    assert time_verdict(compare_samples(x, y)) == "unclear"
    assert time_verdict(compare_samples(y, x)) == "unclear"


def test_single_launches_are_widened_by_the_launch_floor():
    """One launch a side gives an interval no narrower than the assumed spread of launches."""
    x = np.full(20, math.log(0.1))
    test = look([x], [x + 0.1], floor=0.02)
    assert test.p is None
    assert test.log_ratio == pytest.approx(0.1)
    assert test.high - test.log_ratio == pytest.approx(1.959964 * math.sqrt(2) * 0.02)


def test_throughput_mirrors_time():
    """Twice the tokens in the same time is twice the throughput, and higher is better."""
    test = welch([0.0, 0.001, 0.002], [0.0, 0.001, 0.002]).throughput(2.0)
    assert test.log_ratio == pytest.approx(math.log(2))
    assert test.p < 0.001
    assert time_verdict(test, higher=True) == "better"


def test_required_launches_grow_near_the_band():
    """A large effect needs the least number; one near the band more; one at the band too many."""

    def needed(ratio):
        return required_launches(TimeTest(log_ratio=ratio, low=0, high=0, sigma=0.01), band=0.01)

    assert needed(math.log(2)) == 3
    assert 3 < needed(0.022) < needed(0.018)
    assert needed(math.log1p(0.01)) is None
    assert needed(0.0101) is None


def test_memory_threshold_is_a_mebibyte_or_a_thousandth():
    """1 MiB up to 1000 MiB, then 0.1 %."""
    assert memory_threshold(0) == memory_threshold(1 << 29) == 1 << 20
    assert memory_threshold(10 << 30) == math.ceil((10 << 30) / 1000)


@pytest.mark.parametrize(
    ("b", "verdict"),
    [(99, "better"), (100, "better"), (101, "same"), (299, "same"), (300, "worse")],
)
def test_exact_verdict_at_its_limits(b, verdict):
    """A difference of the threshold itself counts, one byte less is the same."""
    assert exact_verdict(200, b, threshold=100) == verdict


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ((0, 10), (110, 120), "worse"),
        ((110, 120), (0, 10), "better"),
        ((0, 200), (150, 300), "unclear"),
        ((0, 10), (20, 30), "same"),
        ((0, 10), (105, 106), "unclear"),
    ],
)
def test_varying_numbers_need_ranges_apart(a, b, verdict):
    """Ranges that overlap, or lie apart by less than the threshold, give no firm verdict."""
    assert range_verdict(a, b, threshold=100) == verdict
