"""Is B different from A? Times are noisy, bytes are not.

A launch gives one number, the median of the logarithms of its step times: steps within a launch
share a clock, caches and neighbours, so they are no replicates (Kalibera & Jones, ISMM 2013).
Differences are differences of logarithms; ``exp`` of one is the ratio B / A.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fsdp_doctor.model.comparison import Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    FloatArray = NDArray[np.float64]

DEFAULT_BAND = 0.01
"""Relative change of no interest, as the noise threshold of criterion.rs."""
MIN_LAUNCHES = 3
"""Launches a side below which time gets no firm verdict."""
CLAIM_FLOOR = 0.0025
"""Least standard deviation between launches (log) believed when it is measured on a few."""
LOOK_FLOOR = 0.02
"""Standard deviation between launches (log) assumed when it cannot be measured."""
ALPHA = 0.05
MEMORY_BYTES = 1 << 20
MEMORY_SHARE = 0.001
MAX_REQUIRED = 100
_NORMAL_95 = 1.959964
_BOOTSTRAP_SAMPLES = 1000
_MOST_PAIRS = 40_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTest:
    """A difference of log times with its 95 % interval."""

    log_ratio: float
    low: float
    high: float
    sigma: float
    """Standard deviation between launches (log), measured or assumed."""
    p: float | None = None
    """Two-sided p-value of no difference; None with one launch on a side."""
    error: float = 0.0
    """Standard error of ``log_ratio``; with ``freedom`` it gives ``p``."""
    freedom: float = math.inf
    launches: tuple[int, int] = (1, 1)

    def widened(self, by: float) -> TimeTest:
        """Return the test with its interval widened by ``by`` (log) on both sides."""
        return replace(self, low=self.low - by, high=self.high + by)

    def throughput(self, work_ratio: float) -> TimeTest:
        """Return the test of work / time, where B does ``work_ratio`` times the work of A."""
        work = math.log(work_ratio)
        ratio = work - self.log_ratio
        p = None if self.p is None else _p_value(ratio, self.error, self.freedom)
        return replace(self, log_ratio=ratio, low=work - self.high, high=work - self.low, p=p)


def compare_samples(
    a: Sequence[FloatArray],
    b: Sequence[FloatArray],
    *,
    claim_floor: float = CLAIM_FLOOR,
    look_floor: float = LOOK_FLOOR,
) -> TimeTest:
    """Compare log times, one array of steps per launch, each with at least one step.

    From two launches a side on, launches are the replicates (``welch``). Below that the steps are
    compared and the interval is widened by ``look_floor`` (``look``).
    """
    if min(len(a), len(b)) >= 2:
        return welch(
            [float(np.median(x)) for x in a], [float(np.median(x)) for x in b], floor=claim_floor
        )
    return look(a, b, floor=look_floor)


def welch(a: Sequence[float], b: Sequence[float], *, floor: float = 0.0) -> TimeTest:
    """Welch's two-sample t interval, with ``floor`` as the least standard deviation of a side.

    Source: ``scipy.stats.ttest_ind(equal_var=False)``, which it equals when ``floor`` is 0. The
    floor keeps a few launches that agree by luck from giving a narrow interval.
    """
    from scipy.special import stdtrit

    n_a, n_b = len(a), len(b)
    variance_a = max(float(np.var(a, ddof=1)), floor**2)
    variance_b = max(float(np.var(b, ddof=1)), floor**2)
    part_a, part_b = variance_a / n_a, variance_b / n_b
    difference = float(np.mean(b) - np.mean(a))
    error = math.sqrt(part_a + part_b)
    freedom, half = math.inf, 0.0
    if error > 0.0:
        freedom = error**4 / (part_a**2 / (n_a - 1) + part_b**2 / (n_b - 1))
        half = float(stdtrit(freedom, 1 - ALPHA / 2)) * error
    return TimeTest(
        log_ratio=difference,
        low=difference - half,
        high=difference + half,
        sigma=math.sqrt((variance_a + variance_b) / 2),
        p=_p_value(difference, error, freedom),
        error=error,
        freedom=freedom,
        launches=(n_a, n_b),
    )


def _p_value(difference: float, error: float, freedom: float) -> float:
    from scipy.special import stdtr

    if error == 0.0:
        return 1.0 if difference == 0.0 else 0.0
    return float(2 * stdtr(freedom, -abs(difference) / error))


def look(a: Sequence[FloatArray], b: Sequence[FloatArray], *, floor: float) -> TimeTest:
    """Compare the steps of single launches: what these launches show, not what the configs do.

    Hodges-Lehmann shift; interval by the stationary bootstrap (Politis & Romano 1994), widened
    for the unseen difference between launches, of standard deviation ``floor`` (log).
    """
    x, y = np.concatenate(list(a)), np.concatenate(list(b))
    shift = location_shift(x, y)
    low, high = bootstrap_interval(x, y)
    extra = _NORMAL_95 * floor * math.sqrt(1 / len(a) + 1 / len(b))
    return TimeTest(
        log_ratio=shift,
        low=shift - math.hypot(max(shift - low, 0.0), extra),
        high=shift + math.hypot(max(high - shift, 0.0), extra),
        sigma=floor,
        launches=(len(a), len(b)),
    )


def hodges_lehmann(a: FloatArray, b: FloatArray) -> float:
    """Return the median of all differences ``b[j] - a[i]`` (Hodges & Lehmann 1963)."""
    return float(np.median(np.subtract.outer(b, a)))


def location_shift(a: FloatArray, b: FloatArray) -> float:
    """Return the Hodges-Lehmann shift, of long series the difference of medians (less memory)."""
    if a.size * b.size <= _MOST_PAIRS:
        return hodges_lehmann(a, b)
    return float(np.median(b) - np.median(a))


def bootstrap_interval(
    a: FloatArray, b: FloatArray, *, samples: int = _BOOTSTRAP_SAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % percentile interval of ``location_shift``; reproducible by ``seed``."""
    generator = np.random.default_rng(seed)
    if a.size * b.size > 10_000:
        samples = max(200, samples * 10_000 // (a.size * b.size))
    length_a, length_b = block_length(a), block_length(b)
    shifts = [
        location_shift(
            a[_resample(a.size, length_a, generator)], b[_resample(b.size, length_b, generator)]
        )
        for _ in range(samples)
    ]
    low, high = np.quantile(shifts, [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)


def block_length(x: FloatArray) -> float:
    """Return the mean block length for a series, by Carlstein's rule for an AR(1) process."""
    if x.size < 4 or float(np.std(x)) == 0.0:
        return 1.0
    centred = x - x.mean()
    rho = abs(float((centred[1:] * centred[:-1]).sum() / (centred**2).sum()))
    rho = min(rho, 0.9)
    length = float((2 * rho / (1 - rho**2)) ** (2 / 3) * x.size ** (1 / 3))
    return min(max(length, 1.0), float(x.size))


def _resample(size: int, length: float, generator: np.random.Generator) -> NDArray[np.intp]:
    """Return indices of one stationary bootstrap sample: blocks of random start and length."""
    jump = generator.random(size) < 1 / length
    jump[0] = True
    starts = generator.integers(size, size=size)
    last_jump = np.maximum.accumulate(np.where(jump, np.arange(size), 0))
    indices: NDArray[np.intp] = (starts[last_jump] + np.arange(size) - last_jump) % size
    return indices


def time_verdict(test: TimeTest, *, band: float = DEFAULT_BAND, higher: bool = False) -> Verdict:
    """Return the verdict by interval and equivalence band; ``higher``: more is better.

    ``same`` needs the whole interval within the band (two one-sided tests), ``worse`` and
    ``better`` need it wholly outside. Below MIN_LAUNCHES a side it is ``unclear``.
    """
    if min(test.launches) < MIN_LAUNCHES:
        return "unclear"
    edge = math.log1p(band)
    if test.low > edge:
        return "better" if higher else "worse"
    if test.high < -edge:
        return "worse" if higher else "better"
    return "same" if test.low >= -edge and test.high <= edge else "unclear"


def required_launches(test: TimeTest, *, band: float = DEFAULT_BAND) -> int | None:
    """Return the launches a side that decide with 80 % power; None beyond MAX_REQUIRED.

    ``2 (1.96 + 0.84)^2 sigma^2 / (|d| - band)^2``, as ``required_nprocesses`` of pyperf.
    """
    distance = abs(abs(test.log_ratio) - math.log1p(band))
    if test.sigma == 0.0:
        return MIN_LAUNCHES
    if distance == 0.0:
        return None
    needed = math.ceil(2 * (1.96 + 0.84) ** 2 * (test.sigma / distance) ** 2)
    return max(needed, MIN_LAUNCHES) if needed <= MAX_REQUIRED else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm (1979): family-wise error, for the primary metrics."""
    count = len(p_values)
    adjusted = [0.0] * count
    largest = 0.0
    for position, index in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        largest = max(largest, (count - position) * p_values[index])
        adjusted[index] = min(largest, 1.0)
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Benjamini & Hochberg (1995): false discovery rate."""
    count = len(p_values)
    adjusted = [0.0] * count
    smallest = 1.0
    for position, index in enumerate(sorted(range(count), key=lambda i: -p_values[i])):
        smallest = min(smallest, p_values[index] * count / (count - position))
        adjusted[index] = smallest
    return adjusted


def memory_threshold(reference: int) -> int:
    """Return the bytes below which a difference from ``reference`` is ``same``."""
    return max(MEMORY_BYTES, math.ceil(MEMORY_SHARE * reference))


def exact_verdict(a: int, b: int, *, threshold: int) -> Verdict:
    """Return the verdict on two exact numbers of which less is better."""
    if abs(b - a) < threshold:
        return "same"
    return "worse" if b > a else "better"


def range_verdict(a: tuple[int, int], b: tuple[int, int], *, threshold: int) -> Verdict:
    """Return the verdict on (lowest, highest) of two numbers that vary; less is better.

    Firm only when the ranges lie ``threshold`` apart, ``same`` only when all values lie closer
    than that, else ``unclear``.
    """
    if b[0] - a[1] >= threshold:
        return "worse"
    if a[0] - b[1] >= threshold:
        return "better"
    spread = max(b[1] - a[0], a[1] - b[0])
    return "same" if spread < threshold else "unclear"
