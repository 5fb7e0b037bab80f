"""Lateness in exchanges with experts: who comes last, for how long the others wait for it, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.analysis.experts.routing import groups_of
from pptrace.model.tables import UNKNOWN, Int64
from pptrace.slices import Slice

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
    others waited for it altogether (``caused``). −1 where the members are not known. ``group`` is a number of those that met,
    ``num_members`` how many they are, ``has_most`` whether it has more rows than any other of them (:func:`has_most_rows`).
    """

    waited: Int64
    is_last: npt.NDArray[np.bool_]
    caused: Int64
    group: Int64
    num_members: Int64
    has_most: npt.NDArray[np.bool_]

    def where(self, chosen: npt.NDArray[Any]) -> Lateness:
        """The lateness of chosen exchanges."""
        return Lateness(*(getattr(self, name)[chosen] for name in self.__slots__))


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
        *(np.full(len(exchanges), UNKNOWN), np.zeros(len(exchanges), np.bool_), np.zeros(len(exchanges), np.int64)),
        *(group, np.where(group >= 0, size[group], 0), has_most_rows(exchanges)),
    )
    lateness.waited[known] = waits
    lateness.is_last[known[firsts]] = total[of[firsts]] > 0  # who enters with all others is not last
    lateness.caused[known[firsts]] = total[of[firsts]]
    return lateness


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
    known = lateness.group >= 0
    rank, share = int(ranks[counts.argmax()]), float(counts.max() / len(np.unique(lateness.group[known])))
    if not is_often(share, float(np.mean(lateness.num_members[known]))):
        return LastRank(rank, share, None)
    if role == DISPATCH:
        return LastRank(rank, share, "before")
    own = lateness.is_last & (exchanges["rank"] == rank)
    if slowness.get(rank, 1.0) >= SLOW:
        return LastRank(rank, share, "slow")
    return LastRank(rank, share, "rows" if np.mean(lateness.has_most[own]) > 0.5 else None)


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
