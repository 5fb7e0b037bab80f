"""Bounds, ends and conversions of clocks, each against a slower way to the same number."""

from __future__ import annotations

import statistics
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.clock import Clock, ClockMethod, estimate_clock, shift
from pptrace.clock.bounds import UNBOUNDED, Traffic, is_bounded, lower_bounds, offset_ranges
from pptrace.clock.offsets import CommonEnd, clamp_offset, from_bounds, offsets_by_common_ends
from pptrace.clock.same_host import same_host_spread
from pptrace.model.traces import HOST, HOST_NAME, SESSION
from tests.support.tables import Match as Row
from tests.support.tables import matched_comms


def comms_of(rows: list[Row]) -> pd.DataFrame:
    return matched_comms(rows).assign(clock="device")


times = st.integers(0, 1_000)


@given(st.data())
def test_the_bounds_between_two_ranks_are_those_of_their_tightest_message_or_collective(data: st.DataObject) -> None:
    ranks = sorted(data.draw(st.sets(st.integers(0, 9), min_size=2, max_size=4)))
    two = st.lists(st.sampled_from(ranks), min_size=2, max_size=2, unique=True)
    messages = data.draw(st.lists(st.tuples(two, times, times), max_size=6))
    groups = st.lists(st.sampled_from(ranks), min_size=2, max_size=4, unique=True)
    calls = data.draw(st.lists(st.tuples(groups, st.lists(times, min_size=8, max_size=8)), max_size=3))
    rows: list[Row] = []
    tightest: dict[tuple[int, int], int] = {}
    for match, ((source, target), sent, received) in enumerate(messages):
        rows += [(source, "send", match, sent, sent + 1), (target, "recv", match, received - 3, received)]
        tightest[source, target] = max(tightest.get((source, target), sent - received), sent - received)
    for match, (members, moments) in enumerate(calls, len(messages)):
        starts, ends = dict(zip(members, moments[:4], strict=False)), dict(zip(members, moments[4:], strict=False))
        rows += [(rank, "all_reduce", match, starts[rank], ends[rank]) for rank in members]
        for pair in product(members, repeat=2):
            slack = starts[pair[0]] - ends[pair[1]]
            tightest[pair] = max(tightest.get(pair, slack), slack)
    low = lower_bounds(comms_of(rows), ranks)
    for (i, one), (j, other) in product(enumerate(ranks), repeat=2):
        assert low[i, j] == (0 if i == j else tightest.get((one, other), -UNBOUNDED))


def test_a_message_of_which_one_end_has_no_trace_bounds_nothing() -> None:
    rows: list[Row] = [(0, "send", 0, 900, 901), (1, "recv", 1, 5, 100), (0, "send", 1, 60, 61), (1, "recv", 2, 0, 9)]
    assert lower_bounds(comms_of(rows), [0, 1]).tolist() == [[0, 60 - 100], [-UNBOUNDED, 0]]
    assert lower_bounds(comms_of(rows[:1]), [0, 1]).tolist() == [[0, -UNBOUNDED], [-UNBOUNDED, 0]]


@given(st.lists(times, min_size=1, max_size=5), st.data())
def test_the_range_of_an_offset_is_that_of_the_tightest_chain_of_pairs(truth: list[int], data: st.DataObject) -> None:
    """Against Floyd and Warshall's closure; the true offsets meet every bound, so no chain contradicts another."""
    num = len(truth)
    low = np.full((num, num), -UNBOUNDED, dtype=np.int64)
    for i, j in product(range(num), repeat=2):
        if data.draw(st.booleans()):
            low[i, j] = truth[j] - truth[i] - data.draw(st.integers(0, 50))
    np.fill_diagonal(low, 0)
    closure = [[int(value) if value > -UNBOUNDED else None for value in row] for row in low]
    for middle, i, j in product(range(num), repeat=3):
        first, second, direct = closure[i][middle], closure[middle][j], closure[i][j]
        if first is not None and second is not None and (direct is None or first + second > direct):
            closure[i][j] = first + second
    for rank, (lower, upper) in enumerate(offset_ranges(low)):
        least, opposite = closure[0][rank], closure[rank][0]
        assert is_bounded(lower, upper) == (least is not None and opposite is not None)
        if least is not None:
            assert lower == least <= truth[rank] - truth[0]
        if opposite is not None:
            assert upper == -opposite >= truth[rank] - truth[0]


@given(st.none() | st.integers(-20, 20), st.integers(-9, 9), st.integers(-9, 9))
def test_an_offset_is_the_nearest_of_its_range_and_its_error_the_farthest(
    offset: int | None, one: int, other: int
) -> None:
    allowed = range(min(one, other), max(one, other) + 1)
    chosen, error = clamp_offset(offset, one, other)
    assert chosen in allowed
    assert error == max(abs(chosen - end) for end in allowed)
    if offset is None:
        assert error == len(allowed) // 2, "in the middle, to a nanosecond"
    else:
        assert abs(chosen - offset) == min(abs(allowed_offset - offset) for allowed_offset in allowed)


def test_a_likely_offset_is_taken_as_far_as_the_bounds_allow_it() -> None:
    low = np.array([[0, -10, -10, -10], [-30, 0, -90, -90], [-30, -90, 0, -90], [-30, -90, -90, 0]])
    clock = from_bounds(
        [2, 3, 5, 7], low, {2: CommonEnd(0, 0), 3: CommonEnd(25, 12), 5: CommonEnd(99, 0), 7: CommonEnd(25, 13)}
    )
    assert clock.offsets_ns == {2: 0, 3: 25, 5: 30, 7: 0}, (
        "0 to itself; inside; at the end; ends that scatter move nothing"
    )
    assert clock.uncertainty_ns == 40, "rank 5 may be anywhere from −10 to 30"
    assert (clock.warnings, clock.unrelated) == ((), frozenset())


def likely_offsets(rows: list[Row], ranks: list[int]) -> dict[int, int]:
    return {rank: end.offset_ns for rank, end in offsets_by_common_ends(comms_of(rows), ranks).items()}


@given(st.lists(st.tuples(times, times), min_size=1, max_size=5), st.lists(st.tuples(times, times), max_size=5))
def test_the_ends_of_messages_both_ways_give_the_mean_of_their_medians(
    there: list[tuple[int, int]], back: list[tuple[int, int]]
) -> None:
    rows: list[Row] = []
    for match, (sent, received) in enumerate(there):
        rows += [(4, "send", match, 0, sent), (6, "recv", match, 0, received)]
    for match, (sent, received) in enumerate(back, len(there)):
        rows += [(6, "send", match, 0, sent), (4, "recv", match, 0, received)]
    ahead = [statistics.median(sent - received for sent, received in there)]
    if back:
        ahead.append(statistics.median(received - sent for sent, received in back))
    assert likely_offsets(rows, [4, 6]) == {4: 0, 6: round(statistics.mean(ahead))}


def test_ends_of_collectives_count_before_those_of_messages_and_chains_go_either_way() -> None:
    """Rank 2's collective with 1 ends 7 later there, rank 0's with 2 ends 40 later; messages do not count."""
    rows: list[Row] = [(1, "all_reduce", 0, 0, 100), (2, "all_reduce", 0, 0, 107)]
    rows += [(0, "all_reduce", 1, 0, 200), (2, "all_reduce", 1, 0, 240)]
    rows += [row for match in (2, 3, 4) for row in ((0, "send", match, 0, 0), (1, "recv", match, 0, 999))]
    assert likely_offsets(rows, [0, 1, 2]) == {0: 0, 2: -40, 1: -33}


def test_the_pair_of_ranks_that_communicates_most_is_taken_first() -> None:
    rows: list[Row] = [(0, "barrier", 0, 0, 10), (2, "barrier", 0, 0, 60)]
    rows += [row for match in (1, 2) for row in ((0, "barrier", match, 0, 10), (1, "barrier", match, 0, 13))]
    rows += [row for match in (3, 4) for row in ((1, "barrier", match, 0, 10), (2, "barrier", match, 0, 14))]
    assert likely_offsets(rows, [0, 1, 2]) == {0: 0, 1: -3, 2: -7}, "not −50, of which there is one"


@given(st.integers(-(10**9), 10**9), st.floats(-1e-3, 1e-3), st.integers(0, 10**9), st.integers(0, 10**9))
def test_there_and_back_between_two_clocks_is_the_same_time(offset: int, rate: float, middle: int, time: int) -> None:
    clock = Clock(ClockMethod.BOUNDS, {1: offset}, 0, rates={1: rate}, middle_ns=middle)
    times = np.array([time])
    common = clock.to_common_clock(1, times)
    assert abs(int(common[0]) - (time + offset + rate * (time + offset - middle))) <= 1
    assert abs(int(clock.times_on_rank_clock(1, common)[0]) - time) <= 1
    assert clock.to_common_clock(0, times).tolist() == [time] == clock.times_on_rank_clock(0, times).tolist()


def test_a_clock_that_drifts_is_corrected_from_its_middle_on() -> None:
    """By half of a nanosecond for each: 40 after the middle 20 more, 40 before it 20 less."""
    clock = Clock(ClockMethod.BOUNDS, {1: 10}, 0, rates={1: 0.5}, middle_ns=100)
    assert clock.to_common_clock(1, np.array([50, 90, 130])).tolist() == [40, 100, 160]
    assert clock.times_on_rank_clock(1, np.array([40, 100, 160])).tolist() == [50, 90, 130]
    from_zero = Clock(ClockMethod.BOUNDS, {}, 0, rates={1: 0.5})
    assert from_zero.to_common_clock(1, np.array([0, 100])).tolist() == [0, 150]
    table = comms_of([(0, "send", 0, 100, 200), (1, "recv", 0, 100, 200)])
    assert shift(table, from_zero)[["start_ns", "end_ns"]].to_numpy().tolist() == [[100, 200], [150, 300]]
    still = Clock(ClockMethod.BOUNDS, {0: 0, 1: 0}, 5, rates={1: 0.0})
    assert shift(table, still) is table


@pytest.mark.parametrize(("late", "violated"), [(1, 0), (0, 0), (-30, 30), (-50_000, 50_000), (-50_001, 50_001)])
def test_one_recording_is_as_exact_as_its_messages_show(late: int, violated: int) -> None:
    """Of a session what is more than a reading error is of messages matched wrongly, and warned about."""
    rows: list[Row] = [(0, "send", 0, 1_000_000, 1_000_001), (1, "recv", 0, 0, 1_000_000 + late)]
    for shared, method in (("ops.csv", ClockMethod.ONE_FILE), (f"{HOST} 7", ClockMethod.SAME_HOST)):
        facts: dict[int, dict[str, object]] = {rank: {"one_clock": shared} for rank in (0, 1)}
        assert estimate_clock(comms_of(rows), [0, 1], facts) == Clock(method, {0: 0, 1: 0}, violated)
    facts = {rank: {"one_clock": f"{SESSION} 7"} for rank in (0, 1)}
    clock = estimate_clock(comms_of(rows), [1, 0], facts)
    assert (clock.method, clock.offsets_ns) == (ClockMethod.SAME_SESSION, {0: 0, 1: 0})
    assert clock.uncertainty_ns == min(violated, 50_000)
    assert len(clock.warnings) == (violated > 50_000)
    assert all("contradict its clock by 50.0 µs" in line for line in clock.warnings)


def test_one_host_by_readings_is_as_exact_as_these_and_its_messages_show() -> None:
    facts = {
        rank: {"host": "a", "clock": {"start": {"time_ns": 5_000 + 40 * rank, "monotonic_ns": 3_000}}}
        for rank in (0, 1)
    }
    for late, expected in ((5, 40), (-39, 40), (-41, 41), (-50_040, 50_040), (-50_041, 50_041)):
        rows: list[Row] = [(0, "send", 0, 1_000_000, 1_000_001), (1, "recv", 0, 0, 1_000_000 + late)]
        clock = estimate_clock(comms_of(rows), [0, 1], facts)
        assert (clock.method, clock.uncertainty_ns) == (ClockMethod.SAME_HOST, expected)
        assert list(clock.early_ends) == ([1] if late == -50_041 else [])
    by_name = {rank: {HOST_NAME: "a"} for rank in (0, 1)}
    for late, method in ((-50_000, ClockMethod.SAME_HOST), (-50_001, ClockMethod.BOUNDS)):
        back: list[Row] = [(1, "send", 1, 1_000_000, 1_000_001), (0, "recv", 1, 0, 1_200_000)]
        rows = [(0, "send", 0, 1_000_000, 1_000_001), (1, "recv", 0, 0, 1_000_000 + late), *back]
        clock = estimate_clock(comms_of(rows), [0, 1], by_name)
        assert clock.method is method
        assert (clock.uncertainty_ns == 50_000) == (method is ClockMethod.SAME_HOST)


@pytest.mark.parametrize(
    ("method", "unrelated", "ranks", "comparable"),
    [
        *((ClockMethod.NONE, {1}, [0, 1], False), (ClockMethod.NONE, {1}, [1], True)),
        *((ClockMethod.BOUNDS, set(), [0, 1], True), (ClockMethod.BOUNDS, {1}, [0, 1], False)),
        *((ClockMethod.BOUNDS, {2}, [0, 1], True), (ClockMethod.ONE_FILE, {0, 1}, [0, 1], True)),
        (ClockMethod.BOUNDS, {0, 1}, [0, 1, 2], False),
    ],
)
def test_ranks_compare_where_all_or_none_of_them_are_unrelated(
    method: ClockMethod, unrelated: set[int], ranks: list[int], comparable: bool
) -> None:
    assert Clock(method, {}, None, unrelated=frozenset(unrelated)).relates(ranks) is comparable


def test_the_spread_of_one_host_is_that_of_all_its_readings() -> None:
    def facts(*differences: int, host: str | None = "a") -> dict[str, object]:
        readings = {str(d): {"time_ns": 1_000 + d, "monotonic_ns": 1_000} for d in differences}
        return {"host": host, "clock": readings}

    assert same_host_spread([0, 1], {0: facts(5, 9), 1: facts(2, 7)}) == 7
    assert same_host_spread([0, 1], {0: facts(5), 1: facts()}) == 0
    assert same_host_spread([0, 1], {0: facts(), 1: facts()}) is None
    assert same_host_spread([0, 1], {0: facts(5), 1: facts(5, host="b")}) is None
    assert same_host_spread([0, 1], {0: facts(5, host=None), 1: facts(5, host=None)}) is None


@given(
    st.lists(st.tuples(st.sampled_from(("send", "all_reduce")), times, times, times, st.integers(0, 2)), max_size=12)
)
def test_the_bounds_of_parts_of_the_traffic_are_those_of_each_part_by_itself(
    matches: list[tuple[str, int, int, int, int]],
) -> None:
    rows: list[Row] = []
    parts: list[int] = []
    for number, (kind, first, second, duration, part) in enumerate(matches):
        other = "recv" if kind == "send" else kind
        rows += [(0, kind, number, first, first + duration), (2, other, number, second, second + duration)]
        parts += [part] * 2
    matched, part_of_row = comms_of(rows), np.array(parts, dtype=np.intp)
    traffic = Traffic.of(matched, [0, 1, 2])
    lows = traffic.lower_bounds_of_parts(traffic.start_ns, traffic.end_ns, part_of_row, 3)
    for part, low in enumerate(lows):
        assert low.tolist() == lower_bounds(matched[part_of_row == part], [0, 1, 2]).tolist()
