"""Interval sets against sets of integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pptrace.intervals import EMPTY, Int64, clip, intersect, length, lengths_within, merge, subtract, union

moments = st.integers(-25, 25)
pairs = st.lists(st.tuples(moments, moments), max_size=12)


def as_set(rows: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in rows for moment in range(start, end)}


def make(rows: list[tuple[int, int]]) -> Int64:
    return union([start for start, _ in rows], [end for _, end in rows])


def check(result: Int64, expected: set[int]) -> None:
    """The set is right, and in its normal form: sorted, disjoint, not even touching, no empty row."""
    assert result.dtype == np.int64
    assert result.ndim == 2
    assert result.shape[1] == 2
    assert as_set([(int(start), int(end)) for start, end in result]) == expected
    assert (result[:, 1] > result[:, 0]).all()
    assert (result[1:, 0] >= result[:-1, 1]).all()
    assert length(result) == len(expected)


@given(pairs)
def test_union_covers_what_any_interval_covers(rows: list[tuple[int, int]]) -> None:
    result = make(rows)
    check(result, as_set(rows))
    assert (result[1:, 0] > result[:-1, 1]).all(), "touching intervals are one"


@given(pairs, pairs)
def test_intersection_is_where_both_are(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    check(intersect(make(a), make(b)), as_set(a) & as_set(b))


@given(pairs, pairs)
def test_difference_is_where_the_second_is_not(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    check(subtract(make(a), make(b)), as_set(a) - as_set(b))


@given(st.lists(pairs, max_size=4))
def test_merge_is_the_union_of_all(sets: list[list[tuple[int, int]]]) -> None:
    check(merge(*map(make, sets)), set().union(*map(as_set, sets)))


@given(pairs, moments, moments)
def test_clip_keeps_what_is_inside(rows: list[tuple[int, int]], start: int, end: int) -> None:
    check(clip(make(rows), start, end), as_set(rows) & set(range(start, end)))


@given(pairs, pairs)
def test_lengths_within_are_those_of_the_clips(rows: list[tuple[int, int]], each: list[tuple[int, int]]) -> None:
    found = lengths_within(make(rows), [start for start, _ in each], [end for _, end in each])
    assert found.tolist() == [len(as_set(rows) & set(range(start, end))) for start, end in each]


@given(pairs, pairs)
def test_a_set_is_split_exactly_by_another(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    one, other = make(a), make(b)
    assert length(intersect(one, other)) + length(subtract(one, other)) == length(one)


def test_nanoseconds_since_1970_stay_exact() -> None:
    now = 1_790_000_000_000_000_001
    rows = union([now, now + 2, now + 10], [now + 3, now + 7, now + 11])
    assert rows.tolist() == [[now, now + 7], [now + 10, now + 11]]
    assert subtract(rows, union([now + 1], [now + 2])).tolist()[0] == [now, now + 1]


def test_nothing_gives_nothing() -> None:
    some = union([1], [5])
    assert length(EMPTY) == len(merge()) == len(intersect(some, EMPTY)) == len(intersect(EMPTY, some)) == 0
    assert subtract(some, EMPTY).tolist() == [[1, 5]]
    assert len(subtract(EMPTY, some)) == len(clip(EMPTY, 0, 9)) == len(union([], [])) == len(union([5, 3], [5, 1])) == 0
