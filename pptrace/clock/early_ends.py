"""Communication that ends before its other side has begun, on ranks that read one clock: its end was recorded wrongly.

A recorder that stops within a message, or loses the range of its wait, leaves a receive that ends when it was posted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.clock.bounds import Pairs, Traffic, numbers_of_matches, reduce_by_match
from pptrace.model.tables import Int64


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
