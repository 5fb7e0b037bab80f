"""Bars in tracks: none lost, none over another, and as few tracks as one bar after the other would give."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pptrace.report.tiles.tracks import MOST_DEPTH, compact, make_tracks

BARS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 60), st.integers(0, 20)), max_size=60)


def tracks_needed(bars: list[tuple[int, int, int, int]]) -> dict[tuple[int, int], int]:
    """The most bars of each (rank, lane) at one time."""
    needed: dict[tuple[int, int], int] = {}
    for rank, lane, at, _ in bars:
        others = [(start, start + length) for *place, start, length in bars if place == [rank, lane]]
        together = sum(start <= at < end for start, end in others)
        needed[rank, lane] = max(needed.get((rank, lane), 0), together)
    return needed


@given(BARS)
@example([(0, 0, 0, 2), (0, 0, 0, 2), (0, 0, 1, 2), (0, 0, 2, 1)])
def test_overlapping_bars_go_below_one_another_and_none_is_lost(bars: list[tuple[int, int, int, int]]) -> None:
    bars = [bar for bar in bars if bar[3] > 0]
    rank, lane, start, length = (np.array([bar[index] for bar in bars], dtype=np.int64) for index in range(4))
    tracks = make_tracks(
        rank, lane, start, length, np.zeros(len(bars), np.int64), columns={"bar": np.arange(len(bars))}
    )
    of_bar = np.repeat(np.arange(len(tracks.rank)), np.diff(tracks.ptr))
    columns = (tracks.rank[of_bar], tracks.lane[of_bar], tracks.start, tracks.length)
    placed = zip(*(column.tolist() for column in columns), strict=True)
    assert list(placed) == [bars[number] for number in tracks.columns["bar"].tolist()]
    assert sorted(tracks.columns["bar"].tolist()) == list(range(len(bars)))
    depths = dict.fromkeys(zip(tracks.rank.tolist(), tracks.lane.tolist(), strict=True), 0)
    for rank_lane, depth in zip(
        zip(tracks.rank.tolist(), tracks.lane.tolist(), strict=True), tracks.depth, strict=True
    ):
        depths[rank_lane] = max(depths[rank_lane], int(depth) + 1)
    assert depths == tracks_needed(bars)
    for first, last in zip(tracks.ptr[:-1].tolist(), tracks.ptr[1:].tolist(), strict=True):
        ends = tracks.start[first:last] + tracks.length[first:last]
        assert (tracks.start[first + 1 : last] >= ends[:-1]).all()


def test_what_overlaps_without_end_shares_the_last_track() -> None:
    count = MOST_DEPTH + 7
    start = np.arange(count, dtype=np.int64)
    none = np.zeros(count, np.int64)
    tracks = make_tracks(none, none, start, np.full(count, 10_000), none)
    assert np.diff(tracks.ptr).tolist() == [1] * MOST_DEPTH + [7]


def test_rounded_times_do_not_put_bars_below_one_another_and_real_overlaps_do() -> None:
    """A lane whose bars overlap by less than a 128th of its shortest one has one track; by more, or with a tiny bar, two."""
    none = np.zeros(3, np.int64)
    start, length = np.array([0, 9_990, 19_980]), np.array([10_000, 10_000, 2_000])
    assert make_tracks(none, none, start, length, none).depths == {0: 1}
    assert make_tracks(none, none, start - [0, 6, 0], length, none).depths == {0: 2}
    assert make_tracks(none, none, start, np.array([10_000, 9_960, 400]), none).depths == {0: 2}


def test_columns_take_as_little_memory_as_their_values_need() -> None:
    assert [compact(np.array(values)).dtype.name for values in ([-1, 100], [300], [2**31], [2**40])] == [
        "int8",
        "int16",
        "uint32",
        "int64",
    ]
    two, one = np.array([3, 5]), np.array([7, 7])
    tracks = make_tracks(one, one, np.array([20, 10]), two, one, columns={"two": two, "one": one})
    assert (tracks.columns["two"].tolist(), tracks.columns["one"].tolist()) == ([5, 3], [7, 7])
    assert tracks.columns["one"].strides == (0,), "one value is kept once"
