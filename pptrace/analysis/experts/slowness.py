"""Slowness of ranks in exchanges with experts: how long their experts take, compared with those of others with as many rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pptrace.analysis.experts.routing import groups_of, time_in_experts, time_per_row
from pptrace.model.tables import UNKNOWN, Int64
from pptrace.slices import Slice, places_of_each

Floats = npt.NDArray[np.float64]


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
    known = times.where(times["group"] >= 0)
    ratios: dict[int, list[Floats]] = {}
    for at in places_of_each(known["place"]):
        for companions in _companions(known.where(at)):
            for rank, of_rank in companions.ratios():
                ratios.setdefault(rank, []).append(of_rank)
    return {rank: float(np.median(np.concatenate(of_rank))) for rank, of_rank in sorted(ratios.items())}


def _companions(times: Slice) -> Iterable[_Companions]:
    """The exchanges of one place by the groups that ranks were in: those that were in the same ones are together."""
    rank, group = times["rank"], times["group"]
    by_group = places_of_each(group)
    number = np.empty(len(group), dtype=np.int64)
    for index, at in enumerate(by_group):
        number[at] = index
    together: dict[bytes, list[int]] = {}
    of_groups: dict[bytes, Int64] = {}
    for own in places_of_each(rank):
        groups = np.unique(number[own])
        together.setdefault(groups.tobytes(), []).append(int(rank[own[0]]))
        of_groups[groups.tobytes()] = groups
    for key, ranks in together.items():
        at = np.concatenate([by_group[index] for index in of_groups[key].tolist()])
        yield _Companions(times.where(at[np.argsort(rank[at], kind="stable")]), ranks)


@dataclass(frozen=True, slots=True, eq=False)
class _Companions:
    """All exchanges of one place in some groups, in the order of their ranks, and the ranks that were in all of these groups and
    in no others.

    What the others of a rank would take is known of all of these ranks by few sorts: a rank's own exchanges are left out of
    sorted times by counting those that are below.
    """

    times: Slice
    ranks: list[int]

    def ratios(self) -> Iterable[tuple[int, Floats]]:
        """Each rank, and the times of its exchanges over those that others would take; none where there are no others."""
        took, rows, every = (self.times[name] for name in ("took", "rows", "rank"))
        slope = float(self.times["slope"][0])
        has_rows = np.flatnonzero(rows > 0)
        per_row, without_rows = _Sorted.of(took[has_rows] / rows[has_rows]), dict[float, _Sorted]()
        least = _Sorted.of(took)
        for rank in self.ranks:
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


@dataclass(frozen=True, slots=True, eq=False)
class _Sorted:
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
