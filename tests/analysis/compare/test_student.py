"""Student's t: values of the printed tables, and the distributions that have a closed form."""

from __future__ import annotations

from math import atan, cos, pi, sin, sqrt

import pytest

from pptrace.analysis.compare.bootstrap import p_value, quantile


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (5, 2.571), (10, 2.228), (30, 2.042), (120, 1.980)]
)
def test_the_quantiles_are_those_of_the_tables(freedom: int, t: float) -> None:
    assert quantile(0.95, freedom) == pytest.approx(t, abs=5e-4)
    assert p_value(t, freedom) == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize("t", [0.01, 0.5, 1.0, 3.0, 40.0])
def test_three_and_four_degrees_of_freedom_have_closed_forms(t: float) -> None:
    angle = atan(t / sqrt(3))
    assert p_value(t, 3) == pytest.approx(1 - 2 / pi * (angle + sin(angle) * cos(angle)), rel=1e-8)
    sine = t / sqrt(4 + t * t)
    assert p_value(t, 4) == pytest.approx(1 - 1.5 * sine + 0.5 * sine**3, rel=1e-8)


@pytest.mark.parametrize("freedom", [1.0, 2.5, 7.0, 60.0])
@pytest.mark.parametrize("confidence", [0.2, 0.5, 0.95, 0.9999])
def test_a_quantile_is_where_the_chance_is_what_is_left(freedom: float, confidence: float) -> None:
    assert p_value(quantile(confidence, freedom), freedom) == pytest.approx(1 - confidence, rel=1e-9)


def test_a_value_whose_square_is_no_number_any_more_is_impossible() -> None:
    assert p_value(1e200, 5) == p_value(-1e200, 5) == 0.0
