"""Deviation from run to run, against simulation and against independent computation."""

from __future__ import annotations

from math import hypot, sqrt
from statistics import fmean, stdev

import numpy as np
import pytest

from pptrace.analysis.compare.bootstrap import Typical, p_value, relative_difference
from pptrace.analysis.compare.run_to_run import Order, typical_of_sides
from tests.support.extent import ALL, by_turns

USUAL = 100_000_000


def runs_of(number: int, deviation: float, rng: np.random.Generator, within: float = 0.001) -> list[Typical]:
    """The typical steps of runs that deviate from one another by a share, and each by its own steps besides."""
    values = USUAL * (1 + hypot(deviation, within) * rng.standard_normal(number))
    return [Typical(round(value), within * USUAL, 11.0, 0.002 * USUAL) for value in values]


def alarms(numbers: tuple[int, int], deviations: tuple[float, float], pairs: int = 1500 if ALL else 600) -> float:
    """The share of pairs of sides without a difference that are called different."""
    rng = np.random.default_rng(sum(numbers))
    count = 0
    for _ in range(pairs):
        both = typical_of_sides(*(runs_of(*side, rng) for side in zip(numbers, deviations, strict=True)))
        found = relative_difference(both.a, both.b)
        count += found is not None and found.p < 0.05
    return count / pairs


@pytest.mark.parametrize(
    ("numbers", "deviation"),
    by_turns(((2, 2), (3, 3), (5, 5), (10, 10), (1, 5), (2, 5), (2, 10), (3, 10)), (0.0, 0.005, 0.015)),
)
def test_runs_that_deviate_alike_give_few_alarms(numbers: tuple[int, int], deviation: float) -> None:
    assert alarms(numbers, (deviation, deviation)) <= 0.06


def test_the_mean_of_runs_has_the_freedom_of_their_number() -> None:
    a, b = [1000, 1010, 1040, 990], [1100, 1120]
    both = typical_of_sides(*([Typical(value, 1.0, 11.0) for value in side] for side in (a, b)))
    assert (both.a.ns, both.b.ns) == (fmean(a), fmean(b))
    assert both.deviation_a == pytest.approx(stdev(a))
    assert both.a.deviation == pytest.approx(stdev(a) / 2)
    assert both.b.deviation == pytest.approx(stdev(b) / sqrt(2))
    assert (both.a.freedom, both.b.freedom, both.a.run_to_run) == (3, 1, 0)
    found = relative_difference(both.a, both.b)
    assert found.freedom <= 2  # that of two sides of two runs
    assert found.p == pytest.approx(p_value(found.estimate / found.deviation, found.freedom))


def test_one_run_against_several_deviates_as_those_do() -> None:
    several, one = [1000, 1010, 1040], Typical(2000, 3.0, 11.0, 5.0)
    of_several = [Typical(value, 2.0, 11.0) for value in several]
    mean = fmean(several)
    for both in (typical_of_sides([one], of_several), typical_of_sides(of_several, [one])):
        alone, group = (both.a, both.b) if both.deviation_a is None else (both.b, both.a)
        between = sqrt(stdev(several) ** 2 - 2**2)
        assert alone.deviation == pytest.approx(hypot(between * 2000 / round(mean), 3.0))
        assert group.deviation == pytest.approx(stdev(several) / sqrt(3))
        assert {alone.most_freedom, group.most_freedom} == {2}
        assert (both.deviation_a or both.deviation_b) == pytest.approx(stdev(several))
        assert None in (both.deviation_a, both.deviation_b)


def drifting(order: Order, slope: float, change: float) -> tuple[list[Typical], list[Typical]]:
    """Runs of a machine that changes by a share from one to the next, without any noise of runs."""
    factors = 1.0, 1 + change
    a, b = (
        [Typical(round(USUAL * factor * (1 + slope * place)), 1000.0, 11.0) for place in places]
        for factor, places in zip(factors, (order.a, order.b), strict=True)
    )
    return a, b


TURNS = Order((0, 2, 4, 6), (1, 3, 5, 7))


def test_a_machine_that_drifts_hides_no_change_of_runs_that_are_taken_in_turns() -> None:
    both = typical_of_sides(*drifting(TURNS, -0.004, 0.01), TURNS)
    found = relative_difference(both.a, both.b)
    assert found.estimate == pytest.approx(0.01, abs=2e-4)
    assert found.p < 0.05
    assert both.trend == pytest.approx(-0.004 * USUAL, rel=0.02)
    unaware = typical_of_sides(*drifting(TURNS, -0.004, 0.01))
    hidden = relative_difference(unaware.a, unaware.b)
    assert hidden.p > 0.05
    assert unaware.trend is None


@pytest.mark.parametrize(
    ("order", "is_taken"),
    [
        (TURNS, True),
        (Order((0, 3, 4, 7), (1, 2, 5, 6)), True),
        (Order((0, 1, 2, 3), (4, 5, 6, 7)), False),
        (Order((0, 2, 4), (1, 3, 5)), False),
        (None, False),
    ],
)
def test_a_trend_is_taken_out_of_four_runs_in_turns(order: Order | None, is_taken: bool) -> None:
    places = TURNS if order is None else order
    assert (typical_of_sides(*drifting(places, 0.002, 0.0), order).trend is not None) is is_taken


def test_the_doubt_of_the_line_is_that_of_a_linear_model() -> None:
    """Against least squares of values on side and place, whose covariance says how certain the difference of the sides is."""
    order = Order((0, 2, 4, 6), (1, 3, 5, 7))
    values = np.array([1000, 1012, 1019, 1033, 1050, 1049, 1072, 1077])
    both = typical_of_sides(
        *([Typical(int(value), 0.1, 11.0) for value in values[part]] for part in (slice(0, 4), slice(4, 8))), order
    )
    places = np.array(order.a + order.b)
    model = np.column_stack((np.ones(8), np.repeat((0, 1), 4), places - places.mean()))
    found, squares, *_ = np.linalg.lstsq(model, values.astype(np.float64), rcond=None)
    variance = squares[0] / (8 - 3) * np.linalg.inv(model.T @ model)[1, 1]
    assert both.trend == pytest.approx(found[2])
    assert both.b.ns - both.a.ns == pytest.approx(found[1], abs=1)
    assert hypot(both.a.deviation, both.b.deviation) == pytest.approx(sqrt(variance))
    assert both.a.freedom + both.b.freedom == 8 - 3
