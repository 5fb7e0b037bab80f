"""Interval sets against sets of integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pptrace.intervals import (
    Int64,
    NestedIntervals,
    clip,
    intersect,
    length,
    lengths_within,
    merge,
    reduce_ranges,
    subtract,
    times_by_group,
    union,
    union_by_group,
)

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
    lengths = lengths_within(make(rows), [start for start, _ in each], [end for _, end in each])
    assert lengths.tolist() == [len(as_set(rows) & set(range(start, end))) for start, end in each]


def test_nanoseconds_since_1970_stay_exact() -> None:
    now = 1_790_000_000_000_000_001
    rows = union([now, now + 2, now + 10], [now + 3, now + 7, now + 11])
    assert rows.tolist() == [[now, now + 7], [now + 10, now + 11]]
    assert subtract(rows, union([now + 1], [now + 2])).tolist()[0] == [now, now + 1]


@given(st.lists(st.integers(-9, 9), min_size=1), st.data())
def test_stretches_of_values_are_reduced_one_by_one_wherever_they_lie(values: list[int], data: st.DataObject) -> None:
    bounds = st.tuples(st.integers(0, len(values) - 1), st.integers(1, len(values))).filter(
        lambda pair: pair[0] < pair[1]
    )
    stretches = data.draw(st.lists(bounds, min_size=1))
    low, high = np.array(stretches, dtype=np.int64).T
    reduced = reduce_ranges(np.maximum, np.array(values, dtype=np.int64), low, high)
    assert reduced.tolist() == [max(values[first:last]) for first, last in stretches]


def nested(rows: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], NestedIntervals]:
    """The rows in the order of their starts, and as intervals."""
    ordered = sorted(rows, key=lambda row: row[0])
    times = np.array(ordered, dtype=np.int64).reshape(-1, 2)
    return ordered, NestedIntervals(times[:, 0], times[:, 1])


@given(pairs, st.lists(moments))
def test_a_time_is_held_by_an_interval_that_has_started_and_not_ended(
    rows: list[tuple[int, int]], times: list[int]
) -> None:
    ordered, intervals = nested(rows)
    expected = [any(start <= time < end for start, end in ordered) for time in times]
    assert intervals.hold(np.array(times, dtype=np.int64)).tolist() == expected


@given(pairs, pairs)
def test_a_stretch_is_covered_by_one_interval_not_by_several(
    rows: list[tuple[int, int]], stretches: list[tuple[int, int]]
) -> None:
    ordered, intervals = nested(rows)
    covering = [
        [index for index, (start, end) in enumerate(ordered) if start <= begin and finish <= end]
        for begin, finish in stretches
    ]
    begins, finishes = np.array(stretches, dtype=np.int64).reshape(-1, 2).T
    assert intervals.cover(begins, finishes).tolist() == [bool(indices) for indices in covering]
    outermost = intervals.outermost(begins, finishes).tolist()
    assert outermost == [indices[0] if indices else -1 for indices in covering]


@given(pairs)
def test_an_interval_begins_inside_another_that_began_before_it(rows: list[tuple[int, int]]) -> None:
    ordered, intervals = nested(rows)
    expected = [any(start < end for _, end in ordered[:index]) for index, (start, _) in enumerate(ordered)]
    assert intervals.are_inside_another().tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 3), moments, moments), max_size=14))
def test_a_union_by_group_is_the_union_of_each_group(rows: list[tuple[int, int, int]]) -> None:
    ordered = sorted(rows, key=lambda row: row[0])
    columns = [[row[column] for row in ordered] for column in range(3)]
    groups, intervals = union_by_group(*columns)
    assert groups.tolist() == sorted(groups.tolist())
    for group in range(4):
        check(intervals[groups == group], as_set([(start, end) for number, start, end in rows if number == group]))


def test_a_union_by_group_takes_times_of_centuries() -> None:
    """Groups far apart in time do not overflow when they are laid one behind the other."""
    late = 2**62
    groups, intervals = union_by_group(
        [0, 0, 1, 1], [-late, -late + 5, late - 9, late - 9], [-late + 3, -late + 9, late, late - 5]
    )
    assert groups.tolist() == [0, 0, 1]
    assert intervals.tolist() == [[-late, -late + 3], [-late + 5, -late + 9], [late - 9, late]]


@given(
    st.lists(st.tuples(st.integers(0, 3), moments), max_size=8),
    st.lists(st.tuples(st.integers(0, 3), moments), max_size=8),
)
def test_keys_of_groups_and_times_compare_as_the_pairs_do(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    columns = [np.array(rows, dtype=np.int64).reshape(-1, 2).T for rows in (a, b)]
    keys = times_by_group(*((column[0], column[1]) for column in columns))
    assert [(x > y) - (x < y) for x in keys[0].tolist() for y in keys[1].tolist()] == [
        (x > y) - (x < y) for x in a for y in b
    ]


def test_keys_of_a_group_for_each_row_of_times() -> None:
    (keys,) = times_by_group((np.array([[0], [1]]), np.array([[5, 9], [5, 7]])))
    assert keys.tolist() == [[0, 4], [5, 7]]


ranges_of_time = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=12)


@given(ranges_of_time, st.lists(st.integers(-2, 65), min_size=1, max_size=20))
def test_the_innermost_interval_is_the_last_that_began_and_goes_on(
    rows: list[tuple[int, int]], times: list[int]
) -> None:
    starts, lengths = (np.array(column, dtype=np.int64) for column in zip(*sorted(rows), strict=True))
    intervals, ends = NestedIntervals(starts, starts + lengths), starts + lengths
    found = intervals.innermost(times).tolist()
    for time, index in zip(times, found, strict=True):
        around = [row for row in range(len(starts)) if starts[row] <= time < ends[row]]
        assert index == max(around, default=-1)
    for row, around in enumerate(intervals.enclosing.tolist()):
        assert around == max((other for other in range(row) if ends[other] > starts[row]), default=-1)


def test_an_interval_at_a_level_is_the_innermost_where_none_is_as_deep() -> None:
    intervals = NestedIntervals(np.array([0, 1, 2, 20]), np.array([10, 9, 5, 30]))
    assert intervals.levels.tolist() == [0, 1, 2, 0]
    assert intervals.at_level([3, 7, 9, 25, 15], 1).tolist() == [1, 1, 0, 3, -1]
    assert intervals.at_level([3, 7, 9, 25, 15], 0).tolist() == [0, 0, 0, 3, -1]
