"""Bounds of the difference between two ranks' clocks, from messages, collectives and chains of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.marks import P2P

Matrix = npt.NDArray[np.int64]
UNBOUNDED = np.iinfo(np.int64).max // 4
ALL_TO_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives in which everyone waits for everyone; a broadcast's root, say, may be done before the others begin."""


def lower_bounds(matched: pd.DataFrame, ranks: Sequence[int]) -> Matrix:
    """Shape (n, n): offset[j] − offset[i] ≥ low[i, j], from single messages and collectives; its upper bound is −low[j, i]."""
    rank_array = np.asarray(ranks)
    low = np.full((len(ranks), len(ranks)), -UNBOUNDED, dtype=np.int64)
    sends, receives = _ends_of_messages(matched)
    rank, start, end = (matched[name].to_numpy() for name in ("rank", "start_ns", "end_ns"))
    source, target = (np.searchsorted(rank_array, rank[rows]) for rows in (sends, receives))
    np.maximum.at(low, (source, target), start[sends] - end[receives])
    collectives = matched[matched["kind"].isin(ALL_TO_ALL)]
    if len(collectives):
        low = np.maximum(low, _of_collectives(collectives, rank_array))
    np.fill_diagonal(low, 0)
    return low


def _ends_of_messages(matched: pd.DataFrame) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """The rows of the two ends of each message, the sends' and the receives'."""
    sends, receives = (np.flatnonzero(matched["kind"] == kind) for kind in P2P)
    match = matched["match"].to_numpy()
    receive_of = np.full(int(match.max(initial=-1)) + 1, -1, dtype=np.intp)
    receive_of[match[receives]] = receives
    other = receive_of[match[sends]]
    return sends[other >= 0], other[other >= 0]


def _of_collectives(rows: pd.DataFrame, rank_array: Matrix) -> Matrix:
    """The same from collectives, in memory proportional to members, not to pairs of them."""
    calls, call = np.unique(rows["match"].to_numpy(), return_inverse=True)
    member = np.searchsorted(rank_array, rows["rank"].to_numpy())
    shape = (len(calls), len(rank_array))
    starts, ends = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    present = np.zeros(shape, dtype=np.bool_)
    present[call, member] = True
    starts[call, member] = rows["start_ns"].to_numpy()
    ends[call, member] = rows["end_ns"].to_numpy()
    low = np.full((len(rank_array), len(rank_array)), -UNBOUNDED, dtype=np.int64)
    for index in range(len(rank_array)):
        has_member = present[:, index]
        slack = starts[has_member, index][:, None] - ends[has_member]
        low[index] = np.max(slack, axis=0, initial=-UNBOUNDED, where=present[has_member])
    return low


def offset_ranges(low: Matrix) -> list[tuple[int, int]]:
    """The lowest and the highest offset of each rank against the first that all chains of messages allow."""
    after_first, before_first = _longest_chains(low), _longest_chains(low.T)
    return [(int(lower), -int(upper)) for lower, upper in zip(after_first, before_first, strict=True)]


def is_bounded(lower: int, upper: int) -> bool:
    return lower > -UNBOUNDED // 2 and upper < UNBOUNDED // 2


def _longest_chains(low: Matrix) -> npt.NDArray[np.int64]:
    """Shape (n,): the tightest bound that a chain of at most n−1 pairs puts on each rank against the first.

    Clocks that drift contradict each other a little, which makes endless chains ever longer: hence the limit.
    """
    best: npt.NDArray[np.int64] = low[0].copy()
    for _ in range(len(low) - 2):
        further = np.maximum((best[:, None] + low).max(axis=0), -UNBOUNDED)
        if (further <= best).all():
            break
        best = np.maximum(best, further)
    return best
