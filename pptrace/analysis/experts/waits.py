"""Waits in exchanges with experts: who comes last, for how long the others wait for it, and why, by kind of call and by step.

Slowness of ranks in exchanges with experts: how long their experts take, compared with those of others with as many rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np
from msgspec import Struct

from pptrace.analysis.experts.routing import groups_of, mean_rows, time_in_experts, time_per_row
from pptrace.analysis.experts.types import ExpertStep
from pptrace.model.tables import UNKNOWN, Bool, Floats, Int64
from pptrace.slices import Slice, places_of_each, reduce_groups

LEAST_COMPARED = 3
"""Exchanges of a rank from which on their median says how slow it is."""


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
        "place": exchanges["stage"] * 6 + (exchanges["backward"] + 1) * 2 + exchanges["again"],
    }
    return Slice(columns)


def median_slowness(times: Slice) -> dict[int, float]:
    """Slowness of each rank by the times of exchanges: how many times as long it takes as the others of its groups would with as
    many rows: the median over exchanges whose rows are known. Ranks of which no others have any like theirs have none; those
    without rows are like others without rows alone.

    What others would take is the median of theirs, moved to as many rows by what a row takes. Down to few rows that is not
    sure, so that who takes less than the least of the others is not slow.
    """
    return _medians(_ratios_of_ranks(times))


def _medians(ratios: Mapping[int, Floats]) -> dict[int, float]:
    return {rank: float(np.median(of_rank)) for rank, of_rank in ratios.items()}


def _ratios_of_ranks(times: Slice) -> dict[int, Floats]:
    """The times of the exchanges of each rank that compare, over what others would take."""
    known = times.where(times["group"] >= 0)
    ratios: dict[int, list[Floats]] = {}
    for at in places_of_each(known["place"]).values():
        for times_together, ranks in _companions(known.where(at)):
            for rank, of_rank in _ratios(times_together, ranks):
                ratios.setdefault(rank, []).append(of_rank)
    return {rank: np.concatenate(of_rank) for rank, of_rank in sorted(ratios.items())}


def _companions(times: Slice) -> Iterable[tuple[Slice, list[int]]]:
    """(all exchanges of one place in some groups, in the order of their ranks; the ranks that were in all of these groups and in
    no others).
    """
    rank, group = times["rank"], times["group"]
    by_group = list(places_of_each(group).values())
    _, number = np.unique(group, return_inverse=True)
    together: dict[bytes, list[int]] = {}
    of_groups: dict[bytes, Int64] = {}
    for of_rank, own in places_of_each(rank).items():
        groups = np.unique(number[own])
        together.setdefault(groups.tobytes(), []).append(of_rank)
        of_groups[groups.tobytes()] = groups
    for key, ranks in together.items():
        at = np.concatenate([by_group[index] for index in of_groups[key].tolist()])
        yield times.where(at[np.argsort(rank[at], kind="stable")]), ranks


def _ratios(times: Slice, ranks: Iterable[int]) -> Iterable[tuple[int, Floats]]:
    """Each of some ranks, and the times of its exchanges over those that others would take; none where there are no others.

    What the others of a rank would take is known of all of these ranks by few sorts: a rank's own exchanges are left out of
    sorted times by counting those that are below.
    """
    took, rows, every = (times[name] for name in ("took", "rows", "rank"))
    slope = float(times["slope"][0])
    has_rows = np.flatnonzero(rows > 0)
    per_row, without_rows = _Sorted.of(took[has_rows] / rows[has_rows]), dict[float, _Sorted]()
    least = _Sorted.of(took)
    for rank in ranks:
        own = slice(*np.searchsorted(every, (rank, rank + 1)))
        with_rows = slice(*np.searchsorted(has_rows, (own.start, own.stop)))
        num_empty = own.stop - own.start - (with_rows.stop - with_rows.start)
        others_empty = len(every) - len(has_rows) > num_empty
        compared = np.arange(own.start, own.stop) if others_empty else has_rows[with_rows]
        if own.stop - own.start == len(every) or not len(compared):
            continue
        of_row = per_row.median_without(with_rows)
        of_rank = slope if of_row is None else min(slope, of_row)
        if of_rank not in without_rows:
            without_rows[of_rank] = _Sorted.of(took - of_rank * rows)
        fixed = without_rows[of_rank].median_without(own)
        assert fixed is not None
        expected = max(fixed, 0.0) + of_rank * rows[compared].astype(np.float64)
        most = np.maximum(took[compared] / max(least.least_without(own), 1.0), 1.0)
        yield rank, np.minimum(took[compared] / np.maximum(expected, 1), most)


class _Sorted(Struct, frozen=True, eq=False):
    """Numbers in ascending order, and where each of them is in it."""

    values: Floats
    places: Int64

    @classmethod
    def of(cls, values: Floats) -> _Sorted:
        """The numbers ``values``, sorted."""
        order = np.argsort(values, kind="stable")
        places = np.empty(len(values), dtype=np.int64)
        places[order] = np.arange(len(values))
        return cls(values[order], places)

    def least_without(self, left_out: slice) -> float:
        """The least of all numbers but some of those that were given, by their places there, where others are left."""
        out = np.sort(self.places[left_out])
        num_below = int(np.argmax(np.append(out, len(self.values)) != np.arange(len(out) + 1)))
        return float(self.values[num_below])

    def median_without(self, left_out: slice) -> float | None:
        """The median of all numbers but some of those that were given, by their places there; None where no others are left."""
        out = np.sort(self.places[left_out])
        num = len(self.values) - len(out)
        if not num:
            return None
        middle = np.array([(num - 1) // 2, num // 2])
        below = np.searchsorted(out - np.arange(len(out)), middle, side="right")
        return float(self.values[middle + below].mean())


DISPATCH, COMBINE = "dispatch", "combine"
ROLES = {DISPATCH: "out", COMBINE: "back"}
"""The calls of an exchange, and what the names of their columns begin with."""
SLOW = 1.15
"""A rank is slow that takes so many times as long as others with as many rows."""
_OFTEN = 1.5
"""A rank is last often that is last so many times as often as by chance, or for which others wait so many times as long."""


class Lateness(Struct, frozen=True, eq=False):
    """Waits of exchanges in calls of one role: what each ``waited`` for the last member, ns (−1 where the members are not known),
    whether it was last, and what the others waited for it altogether (``caused``).
    """

    waited: Int64
    is_last: Bool
    caused: Int64


class Waits(Struct, frozen=True, eq=False, dict=True):
    """Exchanges of all ranks with what their waits are made of, each found when it is first asked for.

    ``group`` is the number of those that met, −1 where that is not known, ``num_members`` how many each of them has.
    """

    exchanges: Slice

    @cached_property
    def _groups(self) -> tuple[Int64, Int64]:
        return groups_of(self.exchanges)

    @property
    def group(self) -> Int64:
        return self._groups[0]

    @property
    def num_members(self) -> Int64:
        return self._groups[1]

    @cached_property
    def mean_rows(self) -> Floats:
        """The mean of the rows of each exchange's group; NaN where it is not known."""
        return mean_rows(self.exchanges)

    @cached_property
    def times(self) -> Slice:
        return times_of_experts(self.exchanges)

    @cached_property
    def _ratios(self) -> dict[int, Floats]:
        return _ratios_of_ranks(self.times)

    @cached_property
    def slowness(self) -> dict[int, float]:
        """The slowness of each rank: how many times as long as others it takes for as many rows. Those of
        :attr:`hardly_compared` have none: one exchange would decide it, such as the first, in which a library is loaded.
        """
        return _medians({rank: of_rank for rank, of_rank in self._ratios.items() if rank not in self.hardly_compared})

    @property
    def hardly_compared(self) -> list[int]:
        """The ranks of which too few exchanges compare with those of others."""
        return [rank for rank, of_rank in self._ratios.items() if len(of_rank) < LEAST_COMPARED]

    @cached_property
    def lateness(self) -> Mapping[str, Lateness]:
        """The lateness in calls of each role."""
        known = np.flatnonzero(self.group >= 0)
        return {role: self._lateness_in(call, known, self.group[known]) for role, call in ROLES.items()}

    def _lateness_in(self, call: str, known: Int64, of: Int64) -> Lateness:
        """The lateness in calls whose columns begin with ``call``; ``of`` are the groups of the ``known`` exchanges."""
        num, size = len(self.exchanges), len(self.num_members)
        enters = self.exchanges[f"{call}_start_ns"][known]
        waits = reduce_groups(np.maximum, enters, of, size)[of] - enters
        total = reduce_groups(np.add, waits, of, size)
        order = np.lexsort((self.exchanges["rank"][known], -enters, of))  # of members that come together the lowest
        firsts = order[np.concatenate(([True], of[order][1:] != of[order][:-1]))] if len(order) else order
        waited, is_last, caused = np.full(num, UNKNOWN), np.zeros(num, np.bool_), np.zeros(num, np.int64)
        waited[known] = waits
        is_last[known[firsts]] = total[of[firsts]] > 0  # who enters with all others is not last
        caused[known[firsts]] = total[of[firsts]]
        return Lateness(waited, is_last, caused)

    @cached_property
    def has_most(self) -> Bool:
        """Mark the exchanges of ranks that have more rows than any other of their group."""
        known = np.flatnonzero(self.group >= 0)
        of, rows = self.group[known], self.exchanges["rows"][known]
        most, least = (reduce_groups(of_all, rows, of, len(self.num_members)) for of_all in (np.maximum, np.minimum))
        marked = np.zeros(len(self.exchanges), dtype=np.bool_)
        marked[known] = (rows == most[of]) & (most[of] > least[of])
        return marked

    def last_rank(self, role: str, at: Int64) -> tuple[int, float, str | None] | None:
        """(the rank that came last most often in the exchanges ``at``, in which share of the calls, why); None where none did, or
        nothing is known of their members.
        """
        is_last, group = self.lateness[role].is_last[at], self.group[at]
        ranks, counts = np.unique(self.exchanges["rank"][at][is_last], return_counts=True)
        if not len(ranks):
            return None
        known = group >= 0
        rank, share = int(ranks[counts.argmax()]), float(counts.max() / len(np.unique(group[known])))
        reason = None
        if _is_often(share, float(np.mean(self.num_members[group[known]]))):
            own = at[is_last & (self.exchanges["rank"][at] == rank)]
            has_most = bool(np.mean(self.has_most[own]) > 0.5)
            reason = _reason(role == DISPATCH, self.slowness.get(rank, 1.0), has_most)
        return rank, share, reason

    @cached_property
    def _ratio_of_group(self) -> Floats:
        """Most rows of a rank over the mean of its group; NaN where it is not known."""
        known = np.flatnonzero(self.mean_rows > 0)
        ratio = np.full(len(self.num_members), np.nan)
        np.fmax.at(ratio, self.group[known], self.exchanges["rows"][known] / self.mean_rows[known])
        return ratio

    def in_step(self, step: int, at: Int64) -> ExpertStep:
        """The waits of a step whose exchanges are ``at`` these places."""
        before, after = (self.lateness[role] for role in ROLES)
        groups = np.unique(self.group[at])
        ratios = self._ratio_of_group[groups[groups >= 0]]
        ratios = ratios[~np.isnan(ratios)]
        ratio = float(ratios.mean()) if len(ratios) else None
        if (before.waited[at] < 0).any():
            return ExpertStep(step, None, None, None, None, None, ratio)
        total = int((before.waited + after.waited)[at].sum())
        ranks, number = np.unique(self.exchanges["rank"][at], return_inverse=True)
        caused = reduce_groups(np.add, (before.caused + after.caused)[at], number, len(ranks))
        rank, late = int(ranks[caused.argmax()]), int(caused.max())
        if not late:
            return ExpertStep(step, total, None, None, None, None, ratio)
        own = at[self.exchanges["rank"][at] == rank]
        met = at[np.isin(self.group[at], self.group[own])]
        waits, reason = int((before.waited + after.waited)[met].sum()), None
        if _is_often(late / waits, float(np.mean(self.num_members[self.group[own]]))):
            of_before, of_after = before.caused[own].sum(), after.caused[own].sum()
            has_most = bool((after.caused[own] * self.has_most[own]).sum() > of_after / 2)
            is_before = bool(of_before >= of_after)
            slowness = 1.0 if is_before else median_slowness(self.times.where(met)).get(rank, 1.0)
            reason = _reason(is_before, slowness, has_most)
        return ExpertStep(step, total, rank, late, late / total, reason, ratio)


def _is_often(share: float, num_members: float) -> bool:
    """Return whether a rank's share is more than by chance in groups of so many members."""
    return share >= min(_OFTEN / num_members, 0.9)


def _reason(is_before: bool, slowness: float, has_most: bool) -> str | None:
    """The reason why others wait for a rank: it comes late, its experts are slow, or have most rows; None: nothing tells."""
    return "before" if is_before else "slow" if slowness >= SLOW else "rows" if has_most else None


def expert_steps(waits: Waits, steps: Iterable[int] = ()) -> tuple[ExpertStep, ...]:
    """The waits of each step with exchanges, and of ``steps`` without any, in the order of their numbers."""
    places = places_of_each(waits.exchanges["step"])
    wanted = sorted({*steps, *(number for number in places if number >= 0)})
    return tuple(
        waits.in_step(number, places[number]) if number in places else ExpertStep(number, *(None,) * 6)
        for number in wanted
    )
