"""Numbers as texts."""

from __future__ import annotations

import pytest

from pptrace.report.units import milliseconds, percent


@pytest.mark.parametrize(
    ("ns", "text"),
    [(None, "–"), (0, "0.00"), (-4_000, "0.00"), (-6_000, "-0.01"), (1_234_567, "1.23"), (12_345_678_901, "12,346")],
)
def test_milliseconds_have_two_digits_unless_there_are_many_and_no_negative_zero(ns: int | None, text: str) -> None:
    assert milliseconds(ns) == text


@pytest.mark.parametrize(("share", "text"), [(None, "–"), (-0.0001, "0.0%"), (-0.001, "-0.1%"), (0.256, "25.6%")])
def test_shares_have_one_digit_and_no_negative_zero(share: float | None, text: str) -> None:
    assert percent(share) == text
