"""Intervals of gains against Student's distribution and the normal one."""

from __future__ import annotations

from math import ceil, floor, sqrt
from statistics import NormalDist, fmean, stdev

import numpy as np
import pytest

from pptrace.analysis.compare.bootstrap import quantile
from pptrace.analysis.stragglers.reason import gain_interval


@pytest.mark.parametrize("gains", [[1_000_000, 3_000_000], [5, 9, 100_000], [-70_000, 10_000, 20_000, 90_000]])
def test_of_two_to_four_steps_it_is_students(gains: list[int]) -> None:
    half = quantile(0.9, len(gains) - 1) * stdev(gains) / sqrt(len(gains))
    low, high = gain_interval(np.array(gains))
    assert low == pytest.approx(floor(fmean(gains) - half), rel=2e-4)
    assert high == pytest.approx(ceil(fmean(gains) + half), rel=2e-4)


def test_of_many_steps_it_is_about_that_of_their_mean() -> None:
    gains = np.random.default_rng(1).normal(1_000_000, 200_000, 400).astype(np.int64)
    half = NormalDist().inv_cdf(0.95) * stdev(gains.tolist()) / 20
    low, high = gain_interval(gains)
    assert low == pytest.approx(gains.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(gains.mean() + half, abs=0.1 * half)


def test_one_step_has_none_and_steps_alike_have_no_width() -> None:
    assert gain_interval(np.array([7])) == (None, None)
    for num_steps in (2, 3, 4, 5, 30):
        assert gain_interval(np.full(num_steps, 7)) == (7, 7)
    low, high = gain_interval(np.array([0, 0, 0, 0, 10]))
    assert low == 0
    assert high == 6
