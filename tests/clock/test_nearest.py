"""Recorded clocks are kept within the bounds, and moved no further than these demand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.clock import ClockMethod, estimate_clock
from pptrace.clock.bounds import UNBOUNDED, Matrix
from pptrace.clock.offsets import CommonEnd, nearest_offsets, offsets_by_common_ends
from tests.support.tables import Match as Row
from tests.support.tables import matched_comms

MS = 1_000_000


def comms_of(rows: Sequence[Row], behind: Sequence[int] = (0,) * 9) -> pd.DataFrame:
    """Communication as clocks show it that are ``behind`` by so much, rank by rank."""
    moved = [(row[0], row[1], row[2], row[3] - behind[row[0]], row[4] - behind[row[0]]) for row in rows]
    return matched_comms(moved).assign(clock="device")


def turns_on_one_device(num_ranks: int, num: int = 12, turn: int = 2 * MS) -> list[Row]:
    """All-reduces of ranks that share a device: the end of each is at its turn, in another order each time."""
    rows: list[Row] = []
    rng = np.random.default_rng(5)
    for match in range(num):
        begin = 20 * MS * match
        for rank, place in enumerate(rng.permutation(num_ranks).tolist()):
            rows.append((rank, "all_reduce", match, begin + place * turn, begin + (num_ranks + place) * turn))
    return rows


def test_clocks_that_no_message_contradicts_stay_where_ranks_take_turns_on_a_device() -> None:
    clock = estimate_clock(comms_of(turns_on_one_device(4)), range(4), {})
    assert (clock.method, set(clock.offsets_ns.values()), clock.warnings) == (ClockMethod.BOUNDS, {0}, ())
    assert 2 * MS <= clock.uncertainty_ns <= 8.1 * MS, "a collective ends on none before it began on all"


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 1, 1), (1, 0, 0, 1)])
def test_ranks_whose_clocks_agree_are_moved_together_where_another_hosts_is_seconds_off(hosts: Sequence[int]) -> None:
    behind = [4_000 * MS * host for host in hosts]
    clock = estimate_clock(comms_of(turns_on_one_device(4), behind), range(4), {})
    moved = [clock.offsets_ns[rank] for rank in range(4)]
    assert [offset == moved[0] for offset in moved] == [host == hosts[0] for host in hosts]
    assert len(set(moved)) == 2
    for rank, offset in enumerate(moved):
        assert abs(offset - (behind[rank] - behind[0])) <= clock.uncertainty_ns


@pytest.mark.parametrize(
    ("behind", "offset", "error"),
    [
        *((0, 0, 40), (40, 0, 80), (-40, 0, 80), (41, 1, 80), (-50, -10, 80), (120, 80, 80), (121, 121, 40)),
        (-5_000, -5_000, 40),
    ],
)
def test_a_clock_is_moved_to_the_nearest_end_and_to_the_middle_where_that_is_farther_than_the_bounds_are_wide(
    behind: int, offset: int, error: int
) -> None:
    rows: list[Row] = [
        *((0, "send", 0, 100, 101), (1, "recv", 0, 95, 140), (1, "send", 1, 300, 301), (0, "recv", 1, 295, 340)),
    ]
    clock = estimate_clock(comms_of(rows, (0, behind)).assign(clock="host"), range(2), {})
    assert clock.offsets_ns == {0: 0, 1: offset}
    assert clock.uncertainty_ns == error


def bounds_of(num_ranks: int, least: dict[tuple[int, int], int]) -> Matrix:
    low = np.full((num_ranks, num_ranks), -UNBOUNDED, dtype=np.int64)
    np.fill_diagonal(low, 0)
    for pair, bound in least.items():
        low[pair] = bound
    return low


def test_two_ranks_that_contradict_each_other_are_moved_though_neither_contradicts_the_first() -> None:
    wide = {(i, j): -20 for i, j in product(range(4), repeat=2) if i != j}
    assert nearest_offsets(range(4), bounds_of(4, wide), {}) == [0, 0, 0, 0]
    assert nearest_offsets(range(4), bounds_of(4, wide | {(1, 2): 6}), {}) == [0, 0, 6, 0]
    odd = wide | {(1, other): 6 for other in (0, 2, 3)}
    assert nearest_offsets(range(4), bounds_of(4, odd), {}) == [0, -6, 0, 0], "one is moved, not three"
    first = wide | {(0, other): 6 for other in (1, 2, 3)}
    assert nearest_offsets(range(4), bounds_of(4, first), {}) == [0, 6, 6, 6], "the first rank's clock is the odd one"


def test_contradictions_within_a_reading_error_move_no_clock_and_larger_ones_have_no_answer() -> None:
    for beyond, offsets in ((50_000, [0, 0]), (50_001, None)):
        assert nearest_offsets(range(2), bounds_of(2, {(0, 1): beyond, (1, 0): beyond}), {}) == offsets


@given(st.lists(st.integers(-300, 300), min_size=2, max_size=6), st.data())
def test_offsets_meet_every_bound(truth: list[int], data: st.DataObject) -> None:
    num = len(truth)
    least = {
        (i, j): truth[j] - truth[i] - data.draw(st.integers(0, 90))
        for i, j in product(range(num), repeat=2)
        if i != j and data.draw(st.booleans())
    }
    likely = {rank: CommonEnd(truth[rank] - truth[0], data.draw(st.none() | st.integers(0, 50))) for rank in range(num)}
    for ends in ({}, likely):
        low = bounds_of(num, least)
        offsets = nearest_offsets(range(num), low, ends)
        assert offsets[0] == 0
        assert all(offsets[j] - offsets[i] >= bound for (i, j), bound in least.items())
        if low.max() <= 0 and not ends:
            assert not any(offsets)


@pytest.mark.parametrize(("scatter", "is_moved"), [(19_000, True), (60_000, False)])
def test_kernels_that_end_together_move_a_clock_within_its_bounds_only_where_they_agree(
    scatter: int, is_moved: bool
) -> None:
    rows: list[Row] = []
    for match in range(12):
        begin = MS * match
        ends = (begin + 500_000, begin + 500_000 + scatter * (match % 3 - 1))
        rows += [(rank, "all_reduce", match, begin, ends[rank]) for rank in (0, 1)]
    clock = estimate_clock(comms_of(rows, (0, 90_000)), range(2), {})
    assert clock.offsets_ns == {0: 0, 1: 90_000 * is_moved}
    few = offsets_by_common_ends(comms_of(rows[:14], (0, 90_000)), range(2))
    assert few[1].offset_ns == pytest.approx(90_000, abs=scatter)
    assert few[1].scatter_ns is None
    assert not few[1].demands_other_than(0)
