"""Formatting of numbers with their units."""

from __future__ import annotations

from pptrace.report.units import uncertainty


def test_how_far_clocks_may_be_off_has_the_unit_of_its_size() -> None:
    assert [uncertainty(ns) for ns in (480, 10_504, 10_504_200)] == ["±0.5 µs", "±10.5 µs", "±10.50 ms"]
