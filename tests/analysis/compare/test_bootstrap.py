"""Typical steps, how certain they are, and the test of a difference; against independent computation on many random series."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from math import hypot, log, sqrt
from statistics import stdev

import numpy as np
import numpy.typing as npt
import pytest

from pptrace.analysis.compare.bootstrap import (
    FEWEST_STEPS,
    LASTING,
    RUN_TO_RUN,
    Typical,
    difference,
    drawn_steps,
    holm,
    p_value,
    quantile,
    relative_difference,
    typical_of,
    typical_of_few,
)
from pptrace.analysis.shared_devices import CORE_WAIT
from tests.support.extent import by_turns
from tests.support.known import known

Series = npt.NDArray[np.int64]
USUAL = 100_000_000


def random_series(num_steps: int, correlation: float, deviation: float, rng: np.random.Generator) -> Series:
    """Steps of a first-order autoregressive series, ns."""
    values = rng.standard_normal(num_steps)
    for step in range(1, num_steps):
        values[step] = correlation * values[step - 1] + np.sqrt(1 - correlation**2) * values[step]
    series: Series = np.rint(USUAL * (1 + deviation * values)).astype(np.int64)
    return series


def test_outliers_at_the_start_change_neither_the_typical_step_nor_its_deviation_by_much() -> None:
    series = random_series(60, 0.0, 0.01, np.random.default_rng(1))
    warm = series.copy()
    warm[:3] *= 5
    calm, upset = typical_of(series), typical_of(warm)
    assert upset.ns == pytest.approx(calm.ns, rel=0.002)
    assert known(upset.deviation) < 2 * known(calm.deviation)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_the_deviation_is_that_of_the_medians_of_many_runs(correlation: float) -> None:
    rng = np.random.default_rng(2)
    runs = [typical_of(random_series(200, correlation, 0.01, rng)) for _ in range(200)]
    measured = np.std([run.ns for run in runs])
    believed = np.sqrt(np.mean([run.deviation**2 for run in runs if run.deviation is not None]))
    assert believed == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("correlation", [0.0, 0.7])
def test_runs_of_one_program_seldom_differ_and_a_slower_one_is_found(correlation: float) -> None:
    rng = np.random.default_rng(3)
    alarms = found = 0
    for _ in range(100):
        a, b = (typical_of(random_series(50, correlation, 0.006, rng)) for _ in range(2))
        slower = typical_of(random_series(50, correlation, 0.006, rng) * 102 // 100)
        same, changed = relative_difference(a, b), relative_difference(a, slower)
        assert same is not None
        assert changed is not None
        alarms += same.p < 0.05
        found += changed.p < 0.05 and changed.estimate > 0
    assert alarms <= 5
    assert found >= 95


def test_lasting_noise_under_that_of_single_ops_gives_few_alarms() -> None:
    """Neighbours correlate by 0.66 where what lasts, of correlation 0.9, is three quarters of the variance."""
    rng = np.random.default_rng(7)

    def run() -> Typical:
        return typical_of(random_series(200, 0.9, 0.01, rng) + random_series(200, 0.0, 0.006, rng) - USUAL)

    tested = [relative_difference(run(), run()) for _ in range(300)]
    alarms = sum(one is not None and one.p < 0.05 for one in tested)
    assert alarms <= 0.06 * len(tested)


def test_an_interval_leaves_out_0_exactly_where_the_difference_is_significant() -> None:
    rng = np.random.default_rng(4)
    decided = set()
    for shift in np.linspace(0.98, 1.02, 41):
        a, b = typical_of(random_series(30, 0.3, 0.01, rng)), typical_of(random_series(30, 0.3, 0.01, rng))
        found = known(relative_difference(a, replace(b, ns=round(b.ns * shift))))
        low, high = found.interval()
        assert (low > 0 or high < 0) == (found.p < 0.05)
        decided.add(found.p < 0.05)
    assert decided == {True, False}


FEW = np.array([31_331_929, 18_601_904, 22_076_863, 17_462_975, 22_291_504, 16_477_852])
FEW_DELAYED = np.array([56_357_560, 56_591_979, 114_500_623, 56_776_593, 67_401_697, 160_217_950])
"""Steps of two ranks that sum gradients, and of the same with a rank that sleeps for 40 ms; the machine was busy in some."""


def test_steps_that_are_longer_by_themselves_do_not_hide_that_all_are_three_times_as_long() -> None:
    found = known(relative_difference(typical_of_few(FEW), typical_of_few(FEW_DELAYED)))
    low, high = np.exp(found.interval())
    assert 1.3 < low < FEW_DELAYED.min() / np.median(FEW) < high < 7


@pytest.mark.parametrize(
    ("num_steps", "deviation", "long_steps"), by_turns(range(2, FEWEST_STEPS), (0.05, 0.1, 0.1, 0.05), (0.0, 1 / 6))
)
def test_few_steps_of_which_some_are_twice_as_long_alarm_seldom_and_three_times_as_long_is_found(
    num_steps: int, deviation: float, long_steps: float
) -> None:
    rng = np.random.default_rng(num_steps)

    def run(factor: float = 1.0) -> Typical:
        steps = 1 + deviation * rng.standard_normal(num_steps)
        steps = np.where(rng.random(num_steps) < long_steps, 2 * steps, steps)
        return typical_of_few(np.rint(USUAL * factor * steps).astype(np.int64))

    pairs = 400
    tested = [(relative_difference(run(), run()), relative_difference(run(), run(3.0))) for _ in range(pairs)]
    alarms = sum(same is not None and same.p < 0.05 for same, _ in tested)
    found = sum(other is not None and other.p < 0.05 for _, other in tested)
    assert alarms <= 0.05 * pairs + 8  # two deviations of a count
    least = 0.98 if not long_steps else 0.65 if num_steps > 3 else 0.35
    assert found >= least * pairs


def test_swapped_runs_differ_by_the_opposite() -> None:
    rng = np.random.default_rng(5)
    a, b = typical_of(random_series(40, 0.2, 0.01, rng)), typical_of(random_series(70, 0.2, 0.02, rng))
    for tested in (relative_difference, difference):
        there, back = tested(a, b), tested(b, a)
        assert there is not None
        assert back is not None
        assert there.estimate == pytest.approx(-back.estimate)
        assert there.p == pytest.approx(back.p)


def test_few_steps_are_no_evidence() -> None:
    few = typical_of(np.full(FEWEST_STEPS - 1, USUAL))
    many = typical_of(np.full(FEWEST_STEPS, 2 * USUAL))
    assert few.deviation is None
    assert difference(few, many) is None
    assert relative_difference(many, few) is None
    assert relative_difference(many, many) is not None


def test_runs_that_do_not_vary_still_differ_from_start_to_start() -> None:
    a = typical_of(np.full(50, USUAL))
    near, far = (typical_of(np.full(50, round(USUAL * (1 + share)))) for share in (RUN_TO_RUN, 5 * RUN_TO_RUN))
    same, other = relative_difference(a, near), relative_difference(a, far)
    assert same is not None
    assert other is not None
    assert same.p > 0.05 > other.p
    assert other.deviation == pytest.approx(np.sqrt(2) * RUN_TO_RUN)


def test_what_is_0_in_both_runs_does_not_differ() -> None:
    nothing = typical_of(np.zeros(20, dtype=np.int64))
    found = known(difference(nothing, nothing))
    assert found.p == 1.0
    assert relative_difference(nothing, nothing) is None


def test_waiting_for_a_core_widens_the_interval() -> None:
    series = random_series(50, 0.0, 0.001, np.random.default_rng(6))
    quiet, busy = typical_of(series), typical_of(series, 0.1 * USUAL)
    calm, upset = relative_difference(quiet, quiet), relative_difference(busy, quiet)
    assert calm is not None
    assert upset is not None
    assert upset.deviation == pytest.approx(np.hypot(calm.deviation, 0.1 * CORE_WAIT), rel=1e-3)
    assert upset.freedom > calm.freedom


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

    medians = [
        sorted(steps[step] for step in sample)[(num_steps - 1) // 2] for sample in drawn_steps(num_steps, length)
    ]
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


def test_steps_that_do_not_vary_have_no_deviation() -> None:
    constant = typical_of(np.full(20, 7))
    assert (constant.ns, constant.deviation, constant.freedom) == (7, 0.0, pytest.approx(20 / 3 - 1))
    assert typical_of(np.full(7, 7)) == Typical(7)


def test_samples_are_blocks_of_neighbours_drawn_from_all_of_them() -> None:
    for num_steps, length in ((8, 2), (28, 4), (30, 4)):
        steps = drawn_steps(num_steps, length)
        assert steps.shape == (500, num_steps)
        starts = steps[:, ::length]
        assert set(starts.ravel().tolist()) == set(range(num_steps - length + 1))
        for place in range(num_steps):
            assert (steps[:, place] == starts[:, place // length] + place % length).all()
    assert drawn_steps(20_000, 28).shape == (250, 20_000)


def test_a_difference_has_the_freedom_of_welch_and_satterthwaite() -> None:
    a, b = Typical(1000, 3.0, 10.0, 2.0), Typical(1100, 4.0, 5.0, 1.0)
    found = known(difference(a, b))
    total = 3**2 + 4**2 + 2**2 + 1**2
    assert found.estimate == 100
    assert found.deviation == pytest.approx(sqrt(total))
    assert found.freedom == pytest.approx(total**2 / (3**4 / 10 + 4**4 / 5))
    assert found.p == pytest.approx(p_value(100 / sqrt(total), found.freedom))
    low, high = found.interval()
    assert (low + high) / 2 == pytest.approx(100)
    assert high - 100 == pytest.approx(quantile(0.95, found.freedom) * sqrt(total))
    relative = known(relative_difference(a, b))
    variances = (3 / 1000) ** 2, (4 / 1100) ** 2
    total_of_shares = sum(variances) + (2 / 1000) ** 2 + (1 / 1100) ** 2
    assert relative.estimate == pytest.approx(log(1.1))
    assert relative.deviation == pytest.approx(sqrt(total_of_shares))
    assert relative.freedom == pytest.approx(total_of_shares**2 / (variances[0] ** 2 / 10 + variances[1] ** 2 / 5))


def test_differences_without_deviation_are_certain_or_none() -> None:
    still, faster, unknown = Typical(10, 0.0, 5.0), Typical(9, 0.0, 5.0), Typical(10)
    certain, same = difference(still, faster), difference(still, still)
    assert certain is not None
    assert same is not None
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


def test_marks_are_those_below_a_limit_that_grows_until_one_is_not() -> None:
    rng = random.Random(0)
    for _ in range(200):
        p_values = [
            rng.choice((0.0, 0.004, 0.0099, 0.0101, 0.012, 0.02, 0.03, 0.2, rng.random() / 20))
            for _ in range(rng.randint(0, 6))
        ]
        num_marked = 0
        for rank, p in enumerate(sorted(p_values)):
            if p >= 0.05 / (len(p_values) - rank):
                break
            num_marked = rank + 1
        marked = [p for p, is_marked in zip(p_values, holm(p_values), strict=True) if is_marked]
        assert sorted(marked) == sorted(p_values)[:num_marked]


@pytest.mark.parametrize("num_steps", [2, 3, 5, 7])
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
        assert same is not None
        assert changed is not None
        alarms += same.p < 0.05
        found += changed.p < 0.05
    assert alarms <= 0.05 * 300
    assert found >= 0.95 * 300


def test_of_one_step_it_is_not_known_how_certain_it_is() -> None:
    assert typical_of_few(np.array([5.0])) == Typical(5)


def test_two_steps_that_happen_to_be_equal_are_not_taken_to_be_exact() -> None:
    same = typical_of_few(np.array([1e8, 1e8]))
    found = known(relative_difference(same, typical_of_few(np.array([1.27e8, 1.27e8]))))
    assert found.p > 0.05
    assert log(1.27) > 1.96 * sqrt(2) * LASTING, "with what lasts alone it would be a difference"
