"""Student's t: values of the printed tables, and the distributions that have a closed form."""

from __future__ import annotations

from math import atan, inf, pi, sqrt
from statistics import NormalDist

import pytest

from pptrace.analysis.compare.student import p_value, quantile


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)]
)
def test_the_quantiles_are_those_of_the_tables(freedom: int, t: float) -> None:
    assert quantile(0.95, freedom) == pytest.approx(t, abs=5e-4)
    assert p_value(t, freedom) == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize("t", [0.01, 0.5, 1.0, 3.0, 40.0])
def test_one_and_two_degrees_of_freedom_have_closed_forms(t: float) -> None:
    assert p_value(t, 1) == pytest.approx(1 - 2 * atan(t) / pi, rel=1e-9)
    assert p_value(-t, 2) == pytest.approx(1 - t / sqrt(2 + t * t), rel=1e-9)


def test_many_degrees_of_freedom_are_a_normal_distribution() -> None:
    assert p_value(1.5, 1e6) == pytest.approx(2 * (1 - NormalDist().cdf(1.5)), rel=1e-5)


def test_nothing_is_certain_and_infinity_impossible() -> None:
    assert p_value(0.0, 7) == 1.0
    assert p_value(inf, 7) == p_value(-inf, 7) == 0.0
