"""Typical steps, how certain they are, and the test of a difference; against independent computation on many random series."""

from __future__ import annotations

from itertools import pairwise
from math import hypot, log, sqrt
from statistics import stdev

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from pptrace.analysis.compare.bootstrap import (
    LASTING,
    Typical,
    difference,
    drawn_steps,
    p_value,
    quantile,
    relative_difference,
    typical_of,
    typical_of_few,
    typical_part,
)

Series = npt.NDArray[np.int64]
USUAL = 100_000_000


def random_series(num_steps: int, correlation: float, deviation: float, rng: np.random.Generator) -> Series:
    """Steps of a first-order autoregressive series, ns."""
    values = rng.standard_normal(num_steps)
    for step in range(1, num_steps):
        values[step] = correlation * values[step - 1] + np.sqrt(1 - correlation**2) * values[step]
    return np.rint(USUAL * (1 + deviation * values)).astype(np.int64)


def test_lasting_noise_under_that_of_single_ops_gives_few_alarms() -> None:
    """Neighbours correlate by 0.66 where what lasts, of correlation 0.9, is three quarters of the variance."""
    rng = np.random.default_rng(7)

    def run() -> Typical:
        return typical_of(random_series(200, 0.9, 0.01, rng) + random_series(200, 0.0, 0.006, rng) - USUAL)

    tested = [relative_difference(run(), run()) for _ in range(300)]
    alarms = sum(one is not None and one.p < 0.05 for one in tested)
    assert alarms <= 0.06 * len(tested)


FEW = np.array([31_331_929, 18_601_904, 22_076_863, 17_462_975, 22_291_504, 16_477_852])
FEW_DELAYED = np.array([56_357_560, 56_591_979, 114_500_623, 56_776_593, 67_401_697, 160_217_950])
"""Steps of two ranks that sum gradients, and of the same with a rank that sleeps for 40 ms; the machine was busy in some."""


def test_steps_that_are_longer_by_themselves_do_not_hide_that_all_are_three_times_as_long() -> None:
    found = relative_difference(typical_of_few(FEW), typical_of_few(FEW_DELAYED))
    low, high = np.exp(found.interval())
    assert 1.3 < low < FEW_DELAYED.min() / np.median(FEW) < high < 7


def independently(series: Series) -> tuple[int, float, float]:
    """(median, deviation, degrees of freedom) in plain numbers, of the same samples."""
    steps = series.tolist()
    num_steps = len(steps)
    length = next(length for length in range(1, num_steps) if length**3 >= num_steps)
    low, high = np.percentile(series, (5, 95))
    clipped = [min(max(step, low), high) for step in steps]
    centred = [step - sum(clipped) / num_steps for step in clipped]
    squares = sum(step**2 for step in centred)
    measured = sum(a * b for a, b in pairwise(centred)) / squares if squares else 0.0
    correlation = min(max(measured + (1 + 3 * measured) / num_steps, 0.0), 0.95) if squares else 0.0

    def summed(count: int, share: float, kept: float) -> float:
        lags = (abs(one - other) for one in range(count) for other in range(count))
        return sum(share * kept**lag if lag else 1.0 for lag in lags) / count

    def beyond(share: float, kept: float) -> float:
        return summed(num_steps, share, kept) / summed(length, share, kept)

    medians = [sorted(steps[step] for step in sample)[(num_steps - 1) // 2] for sample in drawn_steps(num_steps)]
    factor = beyond(1.0, correlation)
    if (noise_on_top := independently_on_top(centred, correlation)) is not None:
        factor = 0.3 * factor + 0.7 * beyond(*noise_on_top)
    deviation = stdev(medians) * sqrt(num_steps / (num_steps - length)) * sqrt(factor)
    independent = num_steps * (1 - correlation) / (1 + correlation)
    return sorted(steps)[(num_steps - 1) // 2], deviation, max(min(num_steps / length, independent) - 1, 1.0)


def independently_on_top(steps: list[float], correlation: float) -> tuple[float, float] | None:
    """(share of the series that lasts, its correlation) of steps without a line through them; None where nothing lasts."""
    centre = (len(steps) - 1) / 2
    slope = sum((at - centre) * step for at, step in enumerate(steps)) / sum(
        (at - centre) ** 2 for at in range(len(steps))
    )
    level = [step - slope * (at - centre) for at, step in enumerate(steps)]
    squares = sum(step**2 for step in level)
    if not squares:
        return None
    lags = [sum(a * b for a, b in zip(level, level[lag:], strict=False)) / squares for lag in (1, 2, 3)]
    first, second, third = (lag + (2 + 4 * max(lag, 0)) / len(steps) for lag in lags)
    kept = (second + third) / (first + second) if first + second > 0 else 0.0
    kept = min(max(kept, correlation), 0.95)
    return (min(first / kept, 1.0), kept) if first > 0 and kept > 0 else None


@pytest.mark.parametrize(
    ("num_steps", "correlation"), [(8, 0.0), (9, 0.9), (27, 0.5), (28, 0.0), (64, 0.99), (65, -0.5)]
)
def test_deviation_and_freedom_are_those_found_independently(num_steps: int, correlation: float) -> None:
    series = random_series(num_steps, correlation, 0.01, np.random.default_rng(num_steps))
    series[3] *= 7
    found, (ns, deviation, freedom) = typical_of(series, 5e6), independently(series)
    assert found.ns == ns
    assert found.deviation == pytest.approx(deviation)
    assert found.freedom == pytest.approx(freedom)
    assert found.run_to_run == pytest.approx(hypot(0.002 * ns, 0.2 * 5e6))
    assert typical_of(series).run_to_run == pytest.approx(0.002 * ns)


def test_a_difference_has_the_freedom_of_welch_and_satterthwaite() -> None:
    a, b = Typical(1000, 3.0, 10.0, 2.0), Typical(1100, 4.0, 5.0, 1.0)
    found = difference(a, b)
    total = 3**2 + 4**2 + 2**2 + 1**2
    assert found.estimate == 100
    assert found.deviation == pytest.approx(sqrt(total))
    assert found.freedom == pytest.approx(total**2 / (3**4 / 10 + 4**4 / 5))
    assert found.p == pytest.approx(p_value(100 / sqrt(total), found.freedom))
    low, high = found.interval()
    assert (low + high) / 2 == pytest.approx(100)
    assert high - 100 == pytest.approx(quantile(0.95, found.freedom) * sqrt(total))
    relative = relative_difference(a, b)
    variances = (3 / 1000) ** 2, (4 / 1100) ** 2
    total_of_shares = sum(variances) + (2 / 1000) ** 2 + (1 / 1100) ** 2
    assert relative.estimate == pytest.approx(log(1.1))
    assert relative.deviation == pytest.approx(sqrt(total_of_shares))
    assert relative.freedom == pytest.approx(total_of_shares**2 / (variances[0] ** 2 / 10 + variances[1] ** 2 / 5))


def test_differences_without_deviation_are_certain_or_none() -> None:
    still, faster, unknown = Typical(10, 0.0, 5.0), Typical(9, 0.0, 5.0), Typical(10)
    certain, same = difference(still, faster), difference(still, still)
    assert (certain.estimate, certain.deviation, certain.freedom, certain.p) == (-1, 0.0, 1e6, 0.0)
    assert (same.p, same.freedom) == (1.0, 1e6)
    for a, b in ((still, unknown), (unknown, still)):
        assert difference(a, b) is None
        assert relative_difference(a, b) is None
    empty = Typical(0, 1.0, 5.0)
    for a, b in ((still, empty), (empty, still)):
        assert relative_difference(a, b) is None
    assert relative_difference(Typical(1, 1.0, 5.0), still) is not None
    assert relative_difference(still, Typical(1, 1.0, 5.0)) is not None


@pytest.mark.parametrize("num_steps", [2, 7])
def test_few_steps_find_a_large_difference_and_seldom_one_that_is_not_there(num_steps: int) -> None:
    """Steps that vary by 5 %, of runs that are off by 5 % as a whole, which none of their steps shows."""
    random = np.random.default_rng(num_steps)
    alarms = found = 0
    for _ in range(300):
        a, b = (
            1e8 * np.exp(random.normal(0, 0.05) + random.normal(0, 0.05, num_steps)).astype(np.float64) for _ in "ab"
        )
        typical = typical_of_few(a)
        same, changed = (relative_difference(typical, typical_of_few(other)) for other in (b, 1.62 * b))
        alarms += same.p < 0.05
        found += changed.p < 0.05
    assert alarms <= 0.05 * 300
    assert found >= 0.95 * 300


def test_two_steps_that_happen_to_be_equal_are_not_taken_to_be_exact() -> None:
    same = typical_of_few(np.array([1e8, 1e8]))
    found = relative_difference(same, typical_of_few(np.array([1.27e8, 1.27e8])))
    assert found.p > 0.05
    assert log(1.27) > 1.96 * sqrt(2) * LASTING, "with what lasts alone it would be a difference"


def test_a_part_of_few_steps_is_that_of_the_median_one() -> None:
    lengths = np.array([50, 10, 40, 20, 70, 60, 30])
    assert typical_part(lengths / 2, lengths) == Typical(20)
    assert typical_part(lengths[:4] / 2, lengths[:4]) == Typical(10)


@pytest.mark.parametrize("num_steps", [8, 9, 30, 51])
def test_parts_of_many_steps_are_means_over_the_half_in_the_middle_by_length(num_steps: int) -> None:
    rng = np.random.default_rng(num_steps)
    of_host = rng.permutation(10_000_000 + np.arange(num_steps) ** 2 * 1_000)
    lengths = of_host + rng.permutation(np.arange(num_steps) * 10)
    by_length = sorted(zip(lengths.tolist(), of_host.tolist(), strict=True))
    left_out = (num_steps - 1) // 2 - (num_steps - 1) // 4
    middle = [part for _, part in by_length[left_out : left_out + 2 * ((num_steps - 1) // 4) + 1]]
    found = typical_part(of_host.astype(np.float64), lengths)
    assert found.ns == round(sum(middle) / len(middle))
    other = typical_part((lengths - of_host).astype(np.float64), lengths)
    assert found.ns + other.ns == pytest.approx(typical_part(lengths.astype(np.float64), lengths).ns, abs=1)


@pytest.mark.parametrize("num_steps", [24, 50])
def test_parts_of_the_typical_step_have_nothing_of_long_steps_that_are_every_third(num_steps: int) -> None:
    waits = 300_000.0 * (np.arange(num_steps) % 3 == 2)
    lengths = np.rint(20_000 + np.arange(num_steps) + waits).astype(np.int64)
    assert typical_part(waits, lengths).ns == 0
    assert typical_part(lengths - waits, lengths).ns == pytest.approx(np.median(lengths), rel=0.01)


def test_parts_are_of_the_half_in_the_middle_where_every_other_step_is_a_long_one() -> None:
    waits = 300_000.0 * (np.arange(30) % 2)
    lengths = np.rint(20_000 + np.arange(30) + waits).astype(np.int64)
    assert typical_part(waits, lengths).ns == round(7 / 15 * 300_000)


def test_the_deviation_of_a_part_is_that_of_many_runs() -> None:
    """The part has little to do with the length of its step, which chooses the steps that count."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        part, rest = (mean + deviation * rng.standard_normal(30) for mean, deviation in ((1e7, 1e6), (1e8, 5e6)))
        found.append(typical_part(part, np.rint(part + rest).astype(np.int64)))
    deviations = [of_run.deviation for of_run in found]
    assert sum(deviations) / len(deviations) == pytest.approx(stdev(of_run.ns for of_run in found), rel=0.12)


def test_parts_without_a_change_are_seldom_called_different() -> None:
    """A wait that is skewed, on top of compute: pairs of runs of 20 steps, each part tested at 5 %."""
    rng = np.random.default_rng(0)

    def parts() -> list[Typical]:
        compute, wait = random_series(20, 0.5, 0.02, rng), 20_000_000 * np.exp(0.5 * rng.standard_normal(20))
        lengths = np.rint(compute + wait).astype(np.int64)
        return [typical_part(part, lengths) for part in (compute.astype(np.float64), wait)]

    pairs = [(parts(), parts()) for _ in range(100)]
    chances = [difference(of_a, of_b).p for a, b in pairs for of_a, of_b in zip(a, b, strict=True)]
    assert 0 < sum(p < 0.05 for p in chances) <= 0.07 * len(chances)
    slower = [difference(a[1], replace(b[1], ns=b[1].ns + 60_000_000)).p for a, b in pairs]
    assert sum(p < 0.05 for p in slower) >= 95
