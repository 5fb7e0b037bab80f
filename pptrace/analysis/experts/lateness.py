"""Lateness in exchanges with experts: who comes last, for how long the others wait for it, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.analysis.experts.routing import groups_of, time_in_experts, time_per_row
from pptrace.model.tables import UNKNOWN, Int64
from pptrace.slices import Slice

Floats = npt.NDArray[np.float64]

DISPATCH, COMBINE = "dispatch", "combine"
ROLES = {DISPATCH: "out", COMBINE: "back"}
"""The calls of an exchange, and what the names of their columns begin with."""
SLOW = 1.15
"""A rank is slow that takes so many times as long as others with as many rows."""
_OFTEN = 1.5
"""A rank is last often that is last so many times as often as by chance, or for which others wait so many times as long."""


@dataclass(frozen=True, slots=True, eq=False)
class Lateness:
    """Lateness of each exchange in calls of one role: ``waited`` for its last member, ns, whether it was ``last``, and what the
    others waited for it altogether (``caused``). −1 where the members are not known.
    """

    waited: Int64
    is_last: npt.NDArray[np.bool_]
    caused: Int64

    def where(self, chosen: npt.NDArray[Any]) -> Lateness:
        """The lateness of chosen exchanges."""
        return Lateness(self.waited[chosen], self.is_last[chosen], self.caused[chosen])


def lateness_of(exchanges: Slice, role: str) -> Lateness:
    """The lateness in calls of a role."""
    group, size = groups_of(exchanges)
    known = np.flatnonzero(group >= 0)
    enters = exchanges[f"{ROLES[role]}_start_ns"][known]
    of = group[known]
    last = np.full(len(size), np.iinfo(np.int64).min)
    np.maximum.at(last, of, enters)
    waits, total = last[of] - enters, np.zeros(len(size), dtype=np.int64)
    np.add.at(total, of, waits)
    order = np.lexsort((exchanges["rank"][known], -enters, of))  # of members that come together the lowest
    firsts = order[np.concatenate(([True], of[order][1:] != of[order][:-1]))] if len(order) else order
    lateness = Lateness(
        *(np.full(len(exchanges), UNKNOWN), np.zeros(len(exchanges), np.bool_), np.zeros(len(exchanges), np.int64))
    )
    lateness.waited[known] = waits
    lateness.is_last[known[firsts]] = total[of[firsts]] > 0  # who enters with all others is not last
    lateness.caused[known[firsts]] = total[of[firsts]]
    return lateness


def slowness_of_ranks(exchanges: Slice) -> dict[int, float]:
    """Slowness of each rank: how many times as long it takes as the others of its groups would with as many rows: the median
    over exchanges whose rows are known.

    What others would take is the median of theirs, moved to as many rows by what a row takes.
    """
    times = times_of_experts(exchanges)
    ranks = np.unique(times["rank"][times["group"] >= 0]).tolist()
    slowness = {rank: slowness_of_rank(times, rank) for rank in ranks}
    return {rank: value for rank, value in slowness.items() if value is not None}


def times_of_experts(exchanges: Slice) -> Slice:
    """Times of each exchange: its ``rank`` and ``rows``, the time in its experts (``took``) and of one more row (``slope``),
    ns, its ``group``, −1 where rows or members are not known, and a number of its stage and direction (``place``).
    """
    group, _ = groups_of(exchanges)
    columns = {
        "rank": exchanges["rank"],
        "rows": exchanges["rows"],
        "took": time_in_experts(exchanges).astype(np.float64),
        "slope": time_per_row(exchanges),
        "group": np.where(exchanges["rows"] < 0, UNKNOWN, group),
        "place": exchanges["stage"] * 4 + exchanges["backward"] * 2 + exchanges["again"],
    }
    return Slice(columns)


def slowness_of_rank(times: Slice, rank: int) -> float | None:
    """The slowness of a rank by the times of its exchanges and those of others; None where no others have any like them."""
    took, rows, group, place = (times[name] for name in ("took", "rows", "group", "place"))
    is_own = times["rank"] == rank
    own = np.flatnonzero(is_own & (group >= 0))
    ratios = []
    for value in np.unique(place[own]).tolist():
        same = own[place[own] == value]
        others = (place == value) & ~is_own & (group >= 0) & np.isin(group, group[same])
        if others.any():
            expected = _expected(took[others], rows[others], times["slope"][same[0]], rows[same])
            ratios.append(took[same] / np.maximum(expected, 1))
    return float(np.median(np.concatenate(ratios))) if ratios else None


def _expected(took: Floats, rows: Int64, slope: float, own_rows: Int64) -> Floats:
    """Time that exchanges with ``own_rows`` would take by others' times and rows: their median without rows, which is not
    below 0, and for each row ``slope``, at most what a row takes them if all time is spent on rows.
    """
    has_rows = rows > 0
    if has_rows.any():
        slope = min(slope, float(np.median(took[has_rows] / rows[has_rows])))
    return max(float(np.median(took - slope * rows)), 0.0) + slope * own_rows.astype(np.float64)


@dataclass(frozen=True, slots=True)
class LastRank:
    """The rank that came last most often, in which share of the calls, and why."""

    rank: int
    share: float
    reason: str | None


def is_often(share: float, num_members: float) -> bool:
    """Return whether a rank's share is more than by chance in groups of so many members."""
    return share >= min(_OFTEN / num_members, 0.9)


def last_rank(exchanges: Slice, role: str, lateness: Lateness, slowness: dict[int, float]) -> LastRank | None:
    """The rank that came last most often in some exchanges, by their lateness; None where none did, or nothing is known of their
    members.
    """
    ranks, counts = np.unique(exchanges["rank"][lateness.is_last], return_counts=True)
    if not len(ranks):
        return None
    group, size = groups_of(exchanges)
    rank, share = int(ranks[counts.argmax()]), float(counts.max() / len(np.unique(group[group >= 0])))
    if not is_often(share, float(np.mean(size[group[group >= 0]]))):
        return LastRank(rank, share, None)
    if role == DISPATCH:
        return LastRank(rank, share, "before")
    own = lateness.is_last & (exchanges["rank"] == rank)
    if slowness.get(rank, 1.0) >= SLOW:
        return LastRank(rank, share, "slow")
    return LastRank(rank, share, "rows" if np.mean(has_most_rows(exchanges)[own]) > 0.5 else None)


def has_most_rows(exchanges: Slice) -> npt.NDArray[np.bool_]:
    """Mark the exchanges of ranks that have more rows than any other of their group."""
    group, size = groups_of(exchanges)
    known = np.flatnonzero(group >= 0)
    most, least = np.zeros(len(size), dtype=np.int64), np.full(len(size), np.iinfo(np.int64).max)
    np.maximum.at(most, group[known], exchanges["rows"][known])
    np.minimum.at(least, group[known], exchanges["rows"][known])
    marked = np.zeros(len(exchanges), dtype=np.bool_)
    of = group[known]
    marked[known] = (exchanges["rows"][known] == most[of]) & (most[of] > least[of])
    return marked
