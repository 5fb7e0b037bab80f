"""Numbers and lists in sentences."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pptrace.model.wording import as_ranges, counted, listed, milliseconds, signed_milliseconds


@pytest.mark.parametrize(
    ("items", "most", "count", "text"),
    [
        *(([0, 3], None, None, "0, 3"), ([0, 3, 5], 3, None, "0, 3, 5")),
        *(([0, 3, 5, 7], 3, None, "0, 3, 5 and 1 more"), ([0, 3, 5], 3, 1000, "0, 3, 5 and 997 more")),
        *(("ab", 1, None, "a and 1 more"), ([], 3, None, "")),
    ],
)
def test_a_list_names_the_first_and_counts_the_rest(
    items: list[object], most: int | None, count: int | None, text: str
) -> None:
    assert listed(items, most, count=count) == text


def test_a_number_has_its_noun_in_the_singular_or_the_plural() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert counted(3, "microbatch", "microbatches") == "3 microbatches"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        *(({3}, "3"), ([8, 3, 4], "3, 4, 8"), (range(200, 300), "200 to 299")),
        *(([0, 5, 6, 7, 9, 10], "0, 5 to 7, 9, 10"), (range(0, 20, 2), "0, 2, 4, 6, 8, 10, 12, 14 and 2 more")),
        ([], ""),
    ],
)
def test_neighbouring_numbers_are_one_part_of_a_list(numbers: Iterable[int], text: str) -> None:
    assert as_ranges(numbers) == text


@pytest.mark.parametrize(
    ("ns", "text", "signed"),
    [
        *((47_300, "0.047", "+0.047"), (-1_200, "-0.001", "-0.001"), (-200, "0.000", "+0.000")),
        *((0, "0.00", "+0.00"), (690_000, "0.69", "+0.69"), (-36_604_000, "-36.60", "-36.60")),
        (1_565_560_000, "1,566", "+1,566"),
    ],
)
def test_a_time_has_whole_ms_from_a_second_on_and_microseconds_where_it_is_short(
    ns: int, text: str, signed: str
) -> None:
    assert (milliseconds(ns), signed_milliseconds(ns)) == (text, signed)


def test_a_time_that_is_not_known_is_a_dash() -> None:
    assert milliseconds(None) == "–"
