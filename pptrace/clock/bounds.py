"""Bounds of the difference between two ranks' clocks, from messages, collectives and chains of them; and communication that ends
before its other side has begun, on ranks that read one clock: its end was recorded wrongly.

A recorder that stops within a message, or loses the range of its wait, leaves a receive that ends when it was posted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct

from pptrace.marks import P2P
from pptrace.model.tables import Int64
from pptrace.slices import reduce_groups, rows_among

Matrix = npt.NDArray[np.int64]
Pairs = npt.NDArray[np.bool_]
"""Shape (n, n): which pairs of ranks, in order."""
UNBOUNDED = np.iinfo(np.int64).max // 4
ALL_TO_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives in which everyone waits for everyone; a broadcast's root, say, may be done before the others begin."""


def lower_bounds(matched: pd.DataFrame, ranks: Sequence[int]) -> Matrix:
    """Shape (n, n): offset[j] − offset[i] ≥ low[i, j], from single messages and collectives; its upper bound is −low[j, i]."""
    traffic = Traffic.of(matched, ranks)
    return traffic.lower_bounds(traffic.start_ns, traffic.end_ns)


class Traffic(Struct, frozen=True):
    """Matched communication as columns: the index of each row's rank and its times, and what relates ranks.

    ``sends`` and ``receives`` are the rows of the two ends of each message; ``collectives`` those of collectives in which
    everyone waits for everyone.
    """

    num_ranks: int
    rank: npt.NDArray[np.intp]
    match: Matrix
    start_ns: Matrix
    end_ns: Matrix
    sends: npt.NDArray[np.intp]
    receives: npt.NDArray[np.intp]
    collectives: npt.NDArray[np.intp]

    @classmethod
    def of(cls, matched: pd.DataFrame, ranks: Sequence[int]) -> Traffic:
        match, start_ns, end_ns = (matched[name].to_numpy() for name in ("match", "start_ns", "end_ns"))
        is_collective = rows_among(matched["kind"], ALL_TO_ALL)
        rank = np.searchsorted(np.asarray(ranks), matched["rank"].to_numpy())
        sends, receives = (np.flatnonzero(matched["kind"] == kind) for kind in P2P)
        receive_of = np.full(int(match.max(initial=-1)) + 1, -1, dtype=np.intp)
        receive_of[match[receives]] = receives
        other = receive_of[match[sends]]
        ends = (sends[other >= 0], other[other >= 0])
        return cls(len(ranks), rank, match, start_ns, end_ns, *ends, np.flatnonzero(is_collective))

    def lower_bounds(self, start_ns: Matrix, end_ns: Matrix) -> Matrix:
        """Bounds as of :func:`lower_bounds`, with other times."""
        (low,) = self.lower_bounds_of_parts(start_ns, end_ns, np.zeros(len(self.rank), dtype=np.intp), 1)
        return low

    def lower_bounds_of_parts(
        self, start_ns: Matrix, end_ns: Matrix, part: npt.NDArray[np.intp], num_parts: int
    ) -> list[Matrix]:
        """The same of several parts of the rows; all rows of a match are in one part."""
        low = np.full((num_parts, self.num_ranks, self.num_ranks), -UNBOUNDED, dtype=np.int64)
        where = (part[self.sends], self.rank[self.sends], self.rank[self.receives])
        np.maximum.at(low, where, start_ns[self.sends] - end_ns[self.receives])
        part_of_collective = part[self.collectives]
        for index in range(num_parts):
            rows = self.collectives[part_of_collective == index]
            if len(rows):
                times = (start_ns[rows], end_ns[rows])
                low[index] = np.maximum(
                    low[index], _of_collectives(self.match[rows], self.rank[rows], *times, self.num_ranks)
                )
            np.fill_diagonal(low[index], 0)
        return list(low)


def _of_collectives(
    match: Matrix, member: npt.NDArray[np.intp], start_ns: Matrix, end_ns: Matrix, num_ranks: int
) -> Matrix:
    """The same from collectives, in memory proportional to members, not to pairs of them."""
    calls, call = np.unique(match, return_inverse=True)
    shape = (len(calls), num_ranks)
    starts, ends = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    present = np.zeros(shape, dtype=np.bool_)
    present[call, member] = True
    starts[call, member] = start_ns
    ends[call, member] = end_ns
    low = np.full((num_ranks, num_ranks), -UNBOUNDED, dtype=np.int64)
    for index in range(num_ranks):
        has_member = present[:, index]
        slack = starts[has_member, index][:, None] - ends[has_member]
        low[index] = np.max(slack, axis=0, initial=-UNBOUNDED, where=present[has_member])
    return low


def numbers_of_matches(match: Matrix) -> npt.NDArray[np.intp]:
    """For each row its match, counted from 0 in ascending order."""
    present = np.zeros(int(match.max(initial=-1)) + 1, dtype=np.intp)
    present[match] = 1
    return (np.cumsum(present) - 1)[match]


def reduce_by_match(function: np.ufunc, values: Matrix, match: Matrix) -> Matrix:
    """The least or the largest of the values of each match, in ascending order of these."""
    number = numbers_of_matches(match)
    return reduce_groups(function, values, number, int(number.max(initial=-1)) + 1)


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


def without_early_ends(
    matched: pd.DataFrame, ranks: Sequence[int], same: Pairs, most_ns: int, least_share: float = 0.5
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(the matched communication without that whose end is wrong, the rows of these ends).

    Where ``least_share`` of the messages between two ranks, and of their collectives, contradict their clock, it is not one
    clock, and nothing is left out.

    Args:
        matched: matched communication (schema COMMS) in each rank's own time.
        same: shape (n, n): the pairs of ranks on one clock, as far as is known without their communication.
        most_ns: how far two readings of one clock may differ.
    """
    traffic = Traffic.of(matched, ranks)
    last, begin_ns = _last_of_collectives(traffic)
    # Each receive with its sender, each member of a collective with the last rank that began, and when that began.
    row = np.append(traffic.receives, traffic.collectives)
    begin_ns = np.append(traffic.start_ns[traffic.sends], begin_ns)
    member, other = traffic.rank[row], np.append(traffic.rank[traffic.sends], last)
    is_early = (begin_ns - traffic.end_ns[row] > most_ns) & same[member, other]
    early = pd.DataFrame({"row": row, "member": member, "other": other})[is_early]
    wrong = [
        pair["row"].to_numpy()
        for (first, second), pair in early.groupby(["member", "other"])
        if len(pair) < least_share * _number_between(traffic, int(str(first)), int(str(second)))
    ]
    if not wrong:
        return matched, matched.iloc[:0]
    rows = np.concatenate(wrong)
    match = matched["match"]
    return matched[~match.isin(match.iloc[rows])], matched.iloc[np.sort(rows)]


def _last_of_collectives(traffic: Traffic) -> tuple[npt.NDArray[np.intp], Int64]:
    """(the last rank that began, when that was) for each member of each collective."""
    rows = traffic.collectives
    match, start_ns = traffic.match[rows], traffic.start_ns[rows]
    call = numbers_of_matches(match)
    begin_ns = reduce_by_match(np.maximum, start_ns, match)[call]
    last = np.zeros(int(call.max(initial=-1)) + 1, dtype=np.intp)
    is_last = start_ns == begin_ns
    last[call[is_last]] = traffic.rank[rows[is_last]]
    return last[call], begin_ns


def _number_between(traffic: Traffic, first: int, second: int) -> int:
    """Number of messages between two ranks, both ways, and of collectives of both."""
    pairs = np.stack((traffic.rank[traffic.sends], traffic.rank[traffic.receives]))
    messages = np.isin(pairs, (first, second)).all(axis=0).sum()
    of_rows, matches = traffic.rank[traffic.collectives], traffic.match[traffic.collectives]
    return int(messages) + len(np.intersect1d(matches[of_rows == first], matches[of_rows == second]))


def without_matches_of(comms: pd.DataFrame, early_ends: Mapping[int, Int64]) -> pd.DataFrame:
    """The communication, unmatched where one side of it has a wrong end: what either side waited for is not known then.

    Args:
        comms: matched, in each rank's own time.
        early_ends: the wrong ends by rank (:attr:`~pptrace.clock.result.Clock.early_ends`).
    """
    rank, end_ns, match = (comms[name].to_numpy() for name in ("rank", "end_ns", "match"))
    is_early = np.zeros(len(comms), dtype=np.bool_)
    for number, ends in early_ends.items():
        is_early |= (rank == number) & np.isin(end_ns, ends)
    wrong = np.unique(match[is_early & (match >= 0)])
    return comms.assign(match=np.where(np.isin(match, wrong), -1, match)) if len(wrong) else comms
