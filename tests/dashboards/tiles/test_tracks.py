"""Bars in tracks: none lost, none over another, and the same tracks as one bar after the other would give."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pptrace.report.tiles.tracks import MOST_DEPTH, compact, make_tracks

BARS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 60), st.integers(0, 20)), max_size=60)


def one_after_the_other(bars: list[tuple[int, int, int, int]]) -> set[tuple[int, int, int, int, int]]:
    """(rank, lane, depth, start, length): bars in order of start, the longer first, each in the first track that is free."""
    free: dict[tuple[int, int], list[int]] = {}
    placed = []
    for rank, lane, start, length in sorted(bars, key=lambda bar: (bar[0], bar[1], bar[2], -bar[3])):
        ends = free.setdefault((rank, lane), [])
        depth = next((number for number, end in enumerate(ends) if end <= start), len(ends))
        if depth == len(ends):
            ends.append(0)
        ends[depth] = start + length
        placed.append((rank, lane, depth, start, length))
    return set(placed)


@given(BARS)
def test_overlapping_bars_go_below_one_another_and_none_is_lost(bars: list[tuple[int, int, int, int]]) -> None:
    bars = [bar for bar in bars if bar[3] > 0]
    rank, lane, start, length = (np.array([bar[index] for bar in bars], dtype=np.int64) for index in range(4))
    tracks = make_tracks(
        rank, lane, start, length, np.zeros(len(bars), np.int64), columns={"bar": np.arange(len(bars))}
    )
    of_bar = np.repeat(np.arange(len(tracks.rank)), np.diff(tracks.ptr))
    placed = zip(
        tracks.rank[of_bar].tolist(),
        tracks.lane[of_bar].tolist(),
        tracks.depth[of_bar].tolist(),
        tracks.start.tolist(),
        tracks.length.tolist(),
        strict=True,
    )
    assert set(placed) == one_after_the_other(bars)
    assert sorted(tracks.columns["bar"].tolist()) == list(range(len(bars)))
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
