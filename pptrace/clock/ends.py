"""The likely offset within its bounds: kernels of one communication end at the same time on all of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from pptrace.clock.bounds import ALL_TO_ALL
from pptrace.marks import P2P

_FEW_ENDS = 8
"""Fewer pairs of ends may agree by chance."""

_MOST_ENDS = 0.8
"""Share of the ends that have to agree: a few kernels end late for reasons of their own."""


@dataclass(frozen=True, slots=True)
class CommonEnd:
    """The offset against the first rank at which kernels of one communication end together, ns.

    ``scatter_ns`` is within how much of that most of them do; None where they are too few to say. Those of ranks that take turns
    on one device scatter by the length of a turn.
    """

    offset_ns: int
    scatter_ns: int | None

    def against(self, other: CommonEnd) -> CommonEnd:
        """The same against another rank than the first one."""
        return CommonEnd(self.offset_ns - other.offset_ns, _sum(self.scatter_ns, other.scatter_ns))

    def demands_other_than(self, offset_ns: int) -> bool:
        """Return whether the ends agree so well that this offset cannot be right."""
        return self.scatter_ns is not None and 2 * self.scatter_ns < abs(self.offset_ns - offset_ns)


def _sum(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first + second


@dataclass(frozen=True, slots=True)
class _Edge:
    """``ahead_ns`` is what must be added to the second rank's times, against the first's, for their ends to agree."""

    first: int
    second: int
    is_message: bool  # its send may be done early: the mean of both ways leaves that out
    count: int
    ahead_ns: int
    scatter_ns: int | None


def offsets_by_common_ends(matched: pd.DataFrame, ranks: Sequence[int]) -> dict[int, CommonEnd]:
    """Offsets against the first rank of the ranks that kernels relate to it; medians, collectives before messages."""
    edges = sorted(
        _edges(matched.loc[matched["clock"] == "device", ["rank", "kind", "match", "end_ns"]]),
        key=lambda edge: (edge.is_message, -edge.count, edge.first, edge.second),
    )
    ends = {ranks[0]: CommonEnd(0, 0)}
    while edge := next((edge for edge in edges if (edge.first in ends) != (edge.second in ends)), None):
        known, other, sign = (edge.first, edge.second, 1) if edge.first in ends else (edge.second, edge.first, -1)
        scatter_ns = _sum(ends[known].scatter_ns, edge.scatter_ns)
        ends[other] = CommonEnd(ends[known].offset_ns + sign * edge.ahead_ns, scatter_ns)
    return ends


def clamp_offset(offset_ns: int | None, lower: int, upper: int) -> tuple[int, int]:
    """(offset clamped to a range, its largest error), ns; the middle of the range without an offset."""
    lower, upper = min(lower, upper), max(lower, upper)
    chosen = (lower + upper) // 2 if offset_ns is None else min(max(offset_ns, lower), upper)
    return chosen, max(upper - chosen, chosen - lower)


def _edges(rows: pd.DataFrame) -> Iterator[_Edge]:
    collectives = rows[rows["kind"].isin(ALL_TO_ALL)].sort_values("rank")
    firsts = collectives.drop_duplicates("match")
    sends, recvs = (rows[rows["kind"] == kind] for kind in P2P)
    for is_message, left, right in ((False, firsts, collectives), (True, sends, recvs)):
        pairs = left.merge(right, on="match", suffixes=("", "_other"))
        by_pair = dict(_agreements(pairs))
        for one, other in sorted({(min(pair), max(pair)) for pair in by_pair if pair[0] != pair[1]}):
            ways = [
                (sign * by_pair[pair].median_ns, by_pair[pair])
                for sign, pair in ((1, (one, other)), (-1, (other, one)))
                if pair in by_pair
            ]
            medians, agreements = zip(*ways, strict=True)
            count = sum(agreement.count for agreement in agreements)
            apart = (max(medians) - min(medians)) / 2
            scatter_ns = round(max(apart, *(agreement.scatter_ns for agreement in agreements)))
            known = scatter_ns if count >= _FEW_ENDS else None
            yield _Edge(one, other, is_message, count, round(sum(medians) / len(medians)), known)


@dataclass(frozen=True, slots=True)
class _Agreement:
    """Median by which ends on one rank are later than on another, and within how much of it most of them are."""

    median_ns: float
    scatter_ns: float
    count: int


def _agreements(pairs: pd.DataFrame) -> Iterator[tuple[tuple[int, int], _Agreement]]:
    """Agreements by pair of ranks, from pairs of ends."""
    later_ns = pairs["end_ns"] - pairs["end_ns_other"]
    by_ranks = [pairs["rank"], pairs["rank_other"]]
    median_ns = later_ns.groupby(by_ranks).transform("median")
    table = pd.DataFrame({"median": median_ns, "scatter": (later_ns - median_ns).abs()}).groupby(by_ranks)
    medians, scatters, counts = table["median"].first(), table["scatter"].quantile(_MOST_ENDS), table.size()
    for (one, other), median, scatter, count in zip(medians.index, medians, scatters, counts, strict=True):
        yield (int(one), int(other)), _Agreement(float(median), float(scatter), int(count))
