"""Formatting of numbers with their units."""

from __future__ import annotations

import pytest

from pptrace.model.units import percent, uncertainty


def test_how_far_clocks_may_be_off_has_the_unit_of_its_size() -> None:
    assert [uncertainty(ns) for ns in (480, 10_504, 10_504_200)] == ["±0.5 µs", "±10.5 µs", "±10.50 ms"]


@pytest.mark.parametrize(("share", "text"), [(None, "–"), (-0.0001, "0.0%"), (-0.001, "-0.1%"), (0.256, "25.6%")])
def test_shares_have_one_digit_and_no_negative_zero(share: float | None, text: str) -> None:
    assert percent(share) == text
