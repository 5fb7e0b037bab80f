"""Memory in tiles against a look at every moment."""

from __future__ import annotations

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from pptrace.report.tiles.cut import NUM_BUCKETS, Range
from pptrace.report.tiles.memory import memory_tracks, most_bytes, most_of_buckets

ORIGIN = 1_000
events = st.lists(st.tuples(st.integers(0, 3 * NUM_BUCKETS), st.integers(0, 99)), max_size=12, unique_by=lambda e: e[0])


def memory_of(rows: dict[int, list[tuple[int, int]]]) -> pd.DataFrame:
    flat = [(rank, ORIGIN + at, held, held) for rank, of_rank in rows.items() for at, held in of_rank]
    return pd.DataFrame(flat, columns=["rank", "t_ns", "allocated_bytes", "reserved_bytes"], dtype=np.int64)


@given(events, st.integers(0, 1), st.integers(0, 2))
def test_a_bucket_has_the_most_that_was_allocated_in_it(rows: list[tuple[int, int]], shift: int, index: int) -> None:
    tracks = memory_tracks(memory_of({5: rows}), {5: 2}, ORIGIN)
    held, level = [], 0
    at = dict(rows)
    time = Range(shift, index)
    for moment in range(time.end):
        level = at.get(moment, level)
        held.append(level)
    width = 1 << shift
    before = [0, *held]  # what a bucket begins with counts too
    expected = [max(*held[begin : begin + width], before[begin]) for begin in range(time.begin, time.end, width)]
    assert most_of_buckets(tracks, list(tracks), time).tolist() == [expected] * bool(rows)
    assert most_bytes(tracks) == max((bytes_held for _, bytes_held in rows), default=0)


def test_ranks_without_a_row_and_events_out_of_order_are_no_matter() -> None:
    tracks = memory_tracks(memory_of({0: [(9, 1), (3, 7)], 4: [(0, 5)]}), {0: 0}, ORIGIN)
    assert list(tracks) == [0]
    assert most_of_buckets(tracks, [0], Range(0, 0))[0, :11].tolist() == [0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 1]
