"""Certainty of a typical step: its standard deviation by a block bootstrap, and the test of a difference between two runs.

Steps follow one another and are not independent: a busy machine is busy for several. Blocks of neighbouring steps are therefore
drawn (the moving block bootstrap, Künsch 1989), of length n^(1/3) rounded up, and of each sample the median is taken. What such
short blocks cut off is put back by the factor by which a first-order autoregressive series of the measured correlation varies
more over n steps than blocks of this length show. Differences are tested as Student's t, with the degrees of freedom of the
number of blocks or of independent steps, whichever is smaller (Welch, Satterthwaite).

The noise of single ops on top of such a series makes neighbours correlate less and shortens nothing: the correlations at the
next lags show that, if little in few steps. The factor is therefore mostly, but not wholly, that of a series with such noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil, exp, hypot, inf, lgamma, log, sqrt

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pptrace.analysis.shared_devices import CORE_WAIT
from pptrace.model.tables import Floats, Int64

FEWEST_STEPS = 8
"""Fewer steps do not show how much steps vary."""
USUAL_DEVIATION, _PRIOR_FREEDOM = 0.05, 2.0
"""Deviation that steps of a run are taken to have, as a share, before any is seen, and how many steps that counts for: of fewer
than ``FEWEST_STEPS`` it is part of what they deviate by (a scaled inverse chi-squared prior of their variance).
"""
LASTING = 0.08
"""Standard deviation, as a share, by which all of so few steps are taken to be off together: a machine that is busy for seconds.
"""
_MOST_APART = 3.0
"""Distance of a step from the median, in median distances, beyond which it says no more of how much the typical step varies: one
in six that takes twice as long would hide that all take three times as long.
"""
CONFIDENCE = 0.95
RUN_TO_RUN = 0.002
"""Standard deviation, as a share, that a run's typical step is allowed besides: two starts of one program place processes and
memory differently, which no step of either run shows."""
_NUM_SAMPLES = 500
_MOST_CELLS = 5_000_000
"""Samples × steps that are drawn; long series, whose medians vary little, get fewer samples."""
_FEWEST_SAMPLES = 100
_ABOUT = 0.05
"""The mean of the steps in the middle may be off the median by this share of it."""
_CLIPPED = (5, 95)
"""Percentiles to which steps are clipped before they are correlated: one outlier would hide how the others follow one another."""
_MOST_CORRELATED = 0.95
_NOISE_ON_TOP = 0.7
"""Weight of the variance of a series with noise on top, against that of a series without. With all of it, a change of 2 % under
noise of correlation 0.7 was found in 86 of 100 pairs of 50 steps, with none in 92, with this weight in 90; false alarms under
noise of ops and lasting noise of correlation 0.9 were 4.5, 7 and 5 (3,600 pairs).
"""


class Typical(Struct, frozen=True):
    """The median of a series of steps, ns (of an even number the lower one, which is a step's), and how certain it is.

    ``deviation`` is its standard deviation, None with too few steps, and ``freedom`` the degrees of freedom of that.
    ``run_to_run`` is a deviation from run to run that comes on top of it, ns. A difference has ``most_freedom`` at most.
    """

    ns: int
    deviation: float | None = None
    freedom: float = inf
    run_to_run: float = 0.0
    most_freedom: float = inf


class Prior(Struct, frozen=True):
    """Standard deviations, as shares, that are taken to be known before any step is seen: of a step from its likes, and of all
    steps of a run together from those of another.
    """

    deviation: float = USUAL_DEVIATION
    lasting: float = LASTING


NOTHING_KNOWN = Prior()
"""Prior of steps of which nothing but their lengths is known."""


class Difference(Struct, frozen=True):
    """B against A. ``p`` is the chance that a difference so large comes by itself, ``deviation`` that of the difference."""

    estimate: float
    deviation: float
    freedom: float
    p: float

    def interval(self) -> tuple[float, float]:
        """(low, high) of the interval of ``CONFIDENCE``."""
        half = quantile(CONFIDENCE, self.freedom) * self.deviation
        return self.estimate - half, self.estimate + half


def typical_of(series: Int64, core_wait_ns: float = 0.0) -> Typical:
    """The typical value of a series of steps in order, ns.

    Args:
        series: a value per step, ns.
        core_wait_ns: for how long a rank waited for a core in a step.
    """
    num_steps = len(series)
    middle = int(lower_median(series))
    if num_steps < FEWEST_STEPS:
        return Typical(middle)
    run_to_run = hypot(RUN_TO_RUN * middle, CORE_WAIT * core_wait_ns)
    samples = lower_median(series[drawn_steps(num_steps)])
    return Typical(middle, *sampled_deviation(samples, series), run_to_run)


def typical_part(part: Floats, lengths: Int64, core_wait_ns: float = 0.0) -> Typical:
    """A part of the typical step, ns: its mean over the half of the steps in the middle by length, or over fewer where the mean
    length of these is another than the median; of few steps what the median one has. Parts that sum to each step sum to that of
    their lengths.

    Args:
        part: a value per step, ns.
        lengths: of the same steps, ns.
        core_wait_ns: as of :func:`typical_of`.
    """
    num_steps = len(part)
    half_width = _half_width(lengths) if num_steps >= FEWEST_STEPS else 0
    mean = float(_mean_of_middle(part, lengths, half_width))
    if num_steps < FEWEST_STEPS:
        return Typical(round(mean))
    run_to_run = hypot(RUN_TO_RUN * mean, CORE_WAIT * core_wait_ns)
    drawn = drawn_steps(num_steps)
    samples = _mean_of_middle(part[drawn], lengths[drawn], half_width)
    return Typical(round(mean), *sampled_deviation(samples, np.rint(part).astype(np.int64)), run_to_run)


def _half_width(lengths: Int64) -> int:
    """The steps on each side of the median one that count: a quarter of all, or down to half as many, until their mean length is
    about the median. Where every third step is a long one, the half in the middle has some of these.
    """
    median, most = float(lower_median(lengths)), (len(lengths) - 1) // 4
    for width in range(most, most // 2, -1):
        if abs(float(_mean_of_middle(lengths.astype(np.float64), lengths, width)) - median) <= _ABOUT * median:
            return width
    return most


def _mean_of_middle(part: Floats, lengths: Int64, half_width: int) -> Floats:
    """The mean of a part over the median step and so many on each side of it by length, along the last axis."""
    middle = (lengths.shape[-1] - 1) // 2
    order = np.argsort(lengths, axis=-1, kind="stable")[..., middle - half_width : middle + half_width + 1]
    mean: Floats = np.take_along_axis(part, order, axis=-1).mean(axis=-1)
    return mean


def sampled_deviation(samples: npt.NDArray[np.int64 | np.float64], series: Int64) -> tuple[float, float]:
    """(standard deviation of a figure of a series, from its values in the drawn samples of it; degrees of freedom of that)."""
    num_steps = len(series)
    length, correlation = block_length(num_steps), _correlation(series)
    deviation = float(samples.std(ddof=1)) * sqrt(num_steps / (num_steps - length))
    independent = num_steps * (1 - correlation) / (1 + correlation)
    freedom = max(min(num_steps / length, independent) - 1, 1.0)
    # the mean of correlated steps deviates more than blocks of this length show
    beyond = sum(
        weight * _variance_of_sum(persistence, share, num_steps) / _variance_of_sum(persistence, share, length)
        for weight, persistence, share in _memories(series, correlation)
    )
    return deviation * sqrt(beyond), freedom


def typical_of_few(series: Int64, known: Prior = NOTHING_KNOWN) -> Typical:
    """The typical value of fewer than ``FEWEST_STEPS`` steps, ns: as uncertain as one of them, since they may be alike; of
    one step it is not known how uncertain. Steps far off the others count as far as these let expect.
    """
    middle, num_steps = int(lower_median(series)), len(series)
    if num_steps < 2:
        return Typical(middle)
    apart = np.sort(np.abs(series - np.median(series)))
    apart = np.minimum(apart, _MOST_APART * np.median(apart[1:]))  # without the one in the middle
    prior = _PRIOR_FREEDOM * (known.deviation * middle) ** 2
    freedom = num_steps - 1 + _PRIOR_FREEDOM
    variance = (float((apart**2).sum()) + prior) / freedom
    return Typical(middle, sqrt(variance), freedom, known.lasting * middle)


def relative_difference(a: Typical, b: Typical) -> Difference | None:
    """The difference of the logarithms, which is ln(1 + change); None with too few steps or where a step takes no time."""
    if a.deviation is None or b.deviation is None or a.ns <= 0 or b.ns <= 0:
        return None
    variances = [((of.deviation or 0.0) / of.ns) ** 2 for of in (a, b)]
    allowed = sum((of.run_to_run / of.ns) ** 2 for of in (a, b))
    return _difference(log(b.ns / a.ns), variances, (a, b), allowed)


def difference(a: Typical, b: Typical) -> Difference | None:
    """The difference, ns; None with too few steps."""
    if a.deviation is None or b.deviation is None:
        return None
    allowed = a.run_to_run**2 + b.run_to_run**2
    return _difference(b.ns - a.ns, [a.deviation**2, b.deviation**2], (a, b), allowed)


def _difference(estimate: float, variances: Sequence[float], both: Sequence[Typical], run_to_run: float) -> Difference:
    """The difference of two values of these variances, each with its degrees of freedom; ``run_to_run`` is a known one."""
    total = sum(variances) + run_to_run
    spread = sum(variance**2 / of.freedom for variance, of in zip(variances, both, strict=True))
    most = min(_KNOWN, *(of.most_freedom for of in both))
    deviation, freedom = sqrt(total), min(total**2 / spread, most) if spread > 0 else most
    t = estimate / deviation if deviation > 0 else inf if estimate else 0.0
    return Difference(estimate, deviation, freedom, p_value(t, freedom))


_KNOWN = 1e6
"""Degrees of freedom of what does not vary: the distribution is a normal one."""


def holm(p_values: Sequence[float]) -> list[bool]:
    """Mark those that are significant together: the chance that any one is marked by itself is 1 − ``CONFIDENCE`` at most
    (Holm 1979).
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    marked = [False] * len(p_values)
    for rank, index in enumerate(order):
        if p_values[index] >= (1 - CONFIDENCE) / (len(p_values) - rank):
            break
        marked[index] = True
    return marked


def lower_median(values: Int64) -> Int64:
    """The median along the last axis; of an even number of values the lower one."""
    middle = (values.shape[-1] - 1) // 2
    return np.partition(values, middle, axis=-1)[..., middle]


def block_length(num_steps: int) -> int:
    """The number of neighbouring steps that are drawn together."""
    length: int = ceil(num_steps ** (1 / 3) - 1e-9)
    return length


@lru_cache(maxsize=4)
def drawn_steps(num_steps: int) -> Int64:
    """Indices of the steps of every sample, shape (samples, steps): blocks of neighbours one after the other."""
    length = block_length(num_steps)
    num_samples = min(_NUM_SAMPLES, max(_MOST_CELLS // num_steps, _FEWEST_SAMPLES))
    shape = (num_samples, ceil(num_steps / length))
    starts = np.random.default_rng(0).integers(0, num_steps - length + 1, shape)
    return (starts[:, :, np.newaxis] + np.arange(length)).reshape(num_samples, -1)[:, :num_steps]


def _correlation(series: Int64) -> float:
    """The correlation of steps with the next ones, from 0 on; corrected for the bias of few steps (Kendall 1954)."""
    values = _clipped(series)
    squares = float((values**2).sum())
    if squares <= 0:
        return 0.0
    measured = float((values[:-1] * values[1:]).sum()) / squares
    return min(max(measured + (1 + 3 * measured) / len(series), 0.0), _MOST_CORRELATED)


def _clipped(series: Int64) -> Floats:
    """The steps about their mean, without what single ones are far off."""
    values: Floats = np.clip(series, *np.percentile(series, _CLIPPED))
    values -= values.mean()
    return values


def _variance_of_sum(persistence: float, share: float, length: int) -> float:
    """The variance of the sum of ``length`` steps, over that of as many independent ones, whose correlation at lag k is
    ``share`` × ``persistence``^k; the rest of their variance is independent noise.
    """
    lag = np.arange(1, length)
    return 1 + 2 * share * float(((1 - lag / length) * persistence**lag).sum())


def _memories(series: Int64, correlation: float) -> tuple[tuple[float, float, float], ...]:
    """(weight, persistence, share) of the ways in which steps may follow one another: as an autoregressive series whose
    neighbours have this correlation, and as one with noise on top.

    The latter is seen in the correlations at the first three lags, without a line through the steps: a drift is no noise. Few
    steps make them seem smaller, by (2 + 4ρ) / n (Kendall 1954 has half of that, for a mean in place of a line).
    """
    values = _clipped(series)
    time = np.arange(len(series)) - (len(series) - 1) / 2
    level = values - time * (time @ values) / (time @ time)
    squares = float(level @ level)
    if squares <= 0:
        return ((1.0, correlation, 1.0),)
    measured = (float(level[:-lag] @ level[lag:]) / squares for lag in (1, 2, 3))
    first, second, third = (lag + (2 + 4 * max(lag, 0.0)) / len(series) for lag in measured)
    kept = (second + third) / (first + second) if first + second > 0 else 0.0
    persistence = min(max(kept, correlation), _MOST_CORRELATED)
    if first <= 0 or persistence <= 0:
        return ((1.0, correlation, 1.0),)
    return ((1 - _NOISE_ON_TOP, correlation, 1.0), (_NOISE_ON_TOP, persistence, min(first / persistence, 1.0)))


_MOST_TERMS = 500
_CLOSE = 1e-13
_TINY = 1e-300


def p_value(t: float, freedom: float) -> float:
    """The chance of a value at least as far from 0 as ``t``, on either side."""
    if t in (inf, -inf):
        return 0.0
    return _beta_share(freedom / 2, 0.5, freedom / (freedom + t * t))


def quantile(confidence: float, freedom: float) -> float:
    """The t within which, on either side of 0, ``confidence`` of the values lie."""
    low, high = 0.0, 1.0
    while p_value(high, freedom) > 1 - confidence:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, freedom) > 1 - confidence else (low, middle)
    return high


def _beta_share(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    factor = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(1 - x))
    if x < (a + 1) / (a + b + 2):
        return factor * _continued_fraction(a, b, x) / a
    return 1 - factor * _continued_fraction(b, a, 1 - x) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Lentz's evaluation of the fraction."""
    upper, lower = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = lower
    for term in range(1, _MOST_TERMS):
        even = term * (b - term) * x / ((a + 2 * term - 1) * (a + 2 * term))
        odd = -(a + term) * (a + b + term) * x / ((a + 2 * term) * (a + 2 * term + 1))
        for coefficient in (even, odd):
            lower = 1 / _away_from_zero(1 + coefficient * lower)
            upper = _away_from_zero(1 + coefficient / upper)
            value *= lower * upper
        if abs(lower * upper - 1) < _CLOSE:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
