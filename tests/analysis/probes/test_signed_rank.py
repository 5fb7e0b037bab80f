"""The middle of values and its interval: against all signs of small samples, and published critical values."""

from __future__ import annotations

from itertools import product
from statistics import median

import numpy as np
import pytest

from pptrace.analysis.probes.signed_rank import middle_of


def test_the_middle_is_the_median_of_the_means_of_all_pairs() -> None:
    values = [3.0, 1.0, 10.0]
    pairs = [3.0, 1.0, 10.0, 2.0, 6.5, 5.5]
    assert middle_of(values, 0.95).value == median(pairs)


@pytest.mark.parametrize(("n", "outside"), [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (15, 25), (20, 52)])
def test_as_many_means_lie_outside_as_the_tables_of_wilcoxons_test_say(n: int, outside: int) -> None:
    """Critical values for 5 % on both sides (Wilcoxon and Wilcox, 1964)."""
    values = np.random.default_rng(n).normal(size=n)
    means = sorted((values[i] + values[j]) / 2 for i in range(n) for j in range(i, n))
    middle = middle_of(values.tolist(), 0.95)
    assert middle.low == pytest.approx(means[outside])
    assert middle.high == pytest.approx(means[-1 - outside])


@pytest.mark.parametrize("n", [1, 2, 5])
def test_too_few_values_have_no_interval(n: int) -> None:
    middle = middle_of([0.5] * n, 0.95)
    assert (middle.value, middle.low, middle.high) == (0.5, None, None)


def test_the_interval_holds_as_often_as_it_says_over_all_signs() -> None:
    """Of values that are as likely above the middle as below it by as much, every pattern of signs is as likely."""
    sizes = np.array([0.3, 1.0, 1.7, 2.9, 3.1, 4.7, 5.2, 8.8, 13.0])
    held = 0
    for signs in product((-1, 1), repeat=len(sizes)):
        middle = middle_of((sizes * signs).tolist(), 0.95)
        assert middle.low is not None
        assert middle.high is not None
        held += middle.low <= 0 <= middle.high
    assert 0.95 <= held / 2 ** len(sizes) < 0.98


def test_one_wild_value_moves_nothing_far() -> None:
    calm = middle_of([1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.02, 0.98], 0.95)
    wild = middle_of([1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.02, 900.0], 0.95)
    assert wild.value == pytest.approx(calm.value, abs=0.05)


def test_very_many_values_are_taken_together() -> None:
    values = np.random.default_rng(0).normal(2.0, 1.0, 20_000)
    middle = middle_of(values.tolist(), 0.95)
    assert middle.low is not None
    assert middle.high is not None
    assert middle.low < 2.0 < middle.high
    assert middle.high - middle.low == pytest.approx(2 * 1.96 / 20_000**0.5, rel=0.2)
