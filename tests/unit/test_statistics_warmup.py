"""Warm-up and steadiness of a launch."""

import numpy as np

from fsdp_doctor.attribution.warmup import assess, mser


def noise(size, seed=0, sd=0.01):
    """Return log times around 0.1 s."""
    return np.log(0.1) + np.random.default_rng(seed).normal(0, sd, size)


def test_mser_drops_a_slow_start():
    """Two steps that take 1.6 and 1.2 times as long are dropped."""
    series = noise(20)
    series[:2] += np.log([1.6, 1.2])
    assert mser(series) >= 2
    assert assess(series).dropped >= 2
    assert assess(series).steady


def test_constant_times_are_steady():
    """Equal times lose no step."""
    state = assess(np.full(12, -2.0))
    assert state.steady
    assert state.dropped == 0


def test_noise_is_not_taken_for_a_warm_up():
    """With 0.5 % noise no step is dropped, whatever MSER finds."""
    assert not any(assess(noise(20, seed=seed, sd=0.005)).dropped for seed in range(100))


def test_a_ramp_is_not_steady():
    """Times that grow by 10 % over the launch are not steady, and the drift is told."""
    state = assess(noise(30, sd=0.002) + np.linspace(0, 0.1, 30))
    assert not state.steady
    assert 0.03 < state.drift < 0.1


def test_noise_is_seldom_taken_for_a_drift():
    """At most 2 % of launches of 20 steps with 3 % noise are called not steady."""
    states = [assess(noise(20, seed=seed, sd=0.03)) for seed in range(300)]
    assert sum(not state.steady for state in states) <= 6


def test_very_short_series_are_left_alone():
    """Five steps are too few to judge."""
    assert assess(np.array([0.0, 1.0, 2.0, 3.0, 4.0])).dropped == 0
