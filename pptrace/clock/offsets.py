"""Offsets that meet all bounds and are the nearest to the recorded clocks.

A recorded clock is the best there is as long as nothing speaks against it. Ranks are placed one after the other, those first that
the fewest others contradict: each keeps its recorded clock if it can, or is moved to the nearest end of what the bounds and the
ranks before it allow. Where that is farther than the bounds are wide, the clock is that of another host and its recorded time
tells nothing: it is moved as ranks before it were that agree with it, or to the middle of the bounds.

The likely offset within the bounds is where kernels of one communication end at the same time on all of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.clock.bounds import ALL_TO_ALL, UNBOUNDED, Matrix, is_bounded, offset_ranges
from pptrace.clock.result import READING_NS, Clock, ClockMethod
from pptrace.marks import P2P
from pptrace.slices import rows_among

_FEW_ENDS = 8
"""Fewer pairs of ends may agree by chance."""
_MOST_ENDS = 0.8
"""Share of the ends that have to agree: a few kernels end late for reasons of their own."""


class CommonEnd(Struct, frozen=True):
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


def offsets_by_common_ends(matched: pd.DataFrame, ranks: Sequence[int]) -> dict[int, CommonEnd]:
    """Offsets against the first rank of the ranks that kernels relate to it; medians, collectives before messages."""
    rows = matched.loc[matched["clock"] == "device", ["rank", "kind", "match", "end_ns"]]
    collectives = rows[rows_among(rows["kind"], ALL_TO_ALL)].sort_values("rank")
    sends, receives = (rows[rows["kind"] == kind] for kind in P2P)
    # Of a message the send may be done early: the mean of both ways leaves that out.
    pairs = _pairs_of_ranks(collectives.drop_duplicates("match"), collectives) + _pairs_of_ranks(sends, receives)
    ends = {ranks[0]: CommonEnd(0, 0)}
    while pair := next((pair for pair in pairs if (pair[0] in ends) != (pair[1] in ends)), None):
        first, second, ahead_ns, scatter_ns = pair
        known, other, sign = (first, second, 1) if first in ends else (second, first, -1)
        offset_ns = ends[known].offset_ns + sign * ahead_ns
        ends[other] = CommonEnd(offset_ns, _sum(ends[known].scatter_ns, scatter_ns))
    return ends


def _pairs_of_ranks(left: pd.DataFrame, right: pd.DataFrame) -> list[tuple[int, int, int, int | None]]:
    """(first, second, ahead, scatter) of pairs of ranks, most communication first: what must be added to the second one's times,
    against the first's, for the ends of their communication to agree, and within how much of it most of them do, if they are
    enough to tell, ns.
    """
    ends = left.merge(right, on="match", suffixes=("", "_other"))
    ends = ends[ends["rank"] != ends["rank_other"]]
    way = [ends["rank"], ends["rank_other"]]
    later_ns = ends["end_ns"] - ends["end_ns_other"]
    off = (later_ns - later_ns.groupby(way).transform("median")).abs()
    ways = pd.DataFrame(
        {
            "median": later_ns.groupby(way).median(),
            "scatter": off.groupby(way).quantile(_MOST_ENDS),
            "number": later_ns.groupby(way).size(),
        }
    ).reset_index()
    is_forward = ways["rank"] < ways["rank_other"]
    ways["first"] = ways["rank"].where(is_forward, ways["rank_other"])
    ways["second"] = ways["rank_other"].where(is_forward, ways["rank"])
    ways["ahead"] = ways["median"].where(is_forward, -ways["median"])
    both = ways.groupby(["first", "second"], as_index=False).agg(
        number=("number", "sum"), low=("ahead", "min"), high=("ahead", "max"), scatter=("scatter", "max")
    )
    both = both.sort_values("number", ascending=False, kind="stable")
    ahead = (both["low"] + both["high"]) / 2
    scatter = np.maximum(both["scatter"], (both["high"] - both["low"]) / 2)
    rows = zip(
        *(column.tolist() for column in (both["first"], both["second"], both["number"], ahead, scatter)), strict=True
    )
    return [
        (first, second, round(ahead_ns), round(scatter_ns) if number >= _FEW_ENDS else None)
        for first, second, number, ahead_ns, scatter_ns in rows
    ]


def clamp_offset(offset_ns: int | None, lower: int, upper: int) -> tuple[int, int]:
    """(offset clamped to a range, its largest error), ns; the middle of the range without an offset."""
    lower, upper = min(lower, upper), max(lower, upper)
    chosen = (lower + upper) // 2 if offset_ns is None else min(max(offset_ns, lower), upper)
    return chosen, max(upper - chosen, chosen - lower)


def from_bounds(ranks: Sequence[int], low: Matrix, likely: Mapping[int, CommonEnd]) -> Clock:
    """Offsets against the first rank: the recorded clocks as far as all bounds and common ends of kernels allow them.

    Where the bounds contradict each other, each rank is placed by itself.
    """
    nearest = nearest_offsets(ranks, low, likely)
    offsets: dict[int, int] = {}
    uncertainty = 0
    warnings = []
    unrelated: set[int] = set()
    for index, (rank, (lower, upper)) in enumerate(zip(ranks, offset_ranges(low), strict=True)):
        ordered = (min(lower, upper), max(lower, upper))
        alone = placed(ordered, upper - lower, (), likely.get(rank)) if nearest is None else nearest[index]
        if is_bounded(lower, upper):
            offsets[rank], width = clamp_offset(alone, lower, upper)
            uncertainty = max(uncertainty, width)
        elif lower > -UNBOUNDED // 2 or upper < UNBOUNDED // 2:
            offsets[rank] = alone
            warnings.append(
                f"rank {rank}: messages bound its clock from one side only: it is moved no further than they demand, and "
                "the uncertainty is null"
            )
        else:
            offsets[rank] = 0
            unrelated.add(rank)
            warnings.append(
                f"rank {rank}: no message relates its clock to rank {ranks[0]}'s: its times are left unchanged, and "
                "figures that compare it with other ranks are null"
            )
    return Clock(ClockMethod.BOUNDS, offsets, None if warnings else uncertainty, tuple(warnings), frozenset(unrelated))


def nearest_offsets(ranks: Sequence[int], low: Matrix, likely: Mapping[int, CommonEnd]) -> list[int] | None:
    """Offsets against the first rank, ns, in the order of the ranks; None where the bounds contradict each other.

    Contradictions no larger than a reading error are none.

    Args:
        low: as of :func:`~pptrace.clock.bounds.lower_bounds`.
        likely: where kernels of one communication end together.
    """
    is_likely = any(end.demands_other_than(0) for end in likely.values())
    if low.max() <= 0 and not is_likely:
        return [0] * len(ranks)
    closed = _closure(low)
    if closed is None:
        closed = _closure(np.where(np.eye(len(low), dtype=np.bool_), 0, np.maximum(low - READING_NS, -UNBOUNDED)))
    if closed is None:
        return None
    order = np.argsort((closed > 0).sum(axis=0) + (closed > 0).sum(axis=1), kind="stable").tolist()
    anchor = order[0]
    likely_here = {
        index: likely[rank].against(likely[ranks[anchor]])
        for index, rank in enumerate(ranks)
        if rank in likely and ranks[anchor] in likely
    }
    lower, upper = closed[anchor].copy(), -closed[:, anchor]
    width = upper - lower
    offsets = {anchor: 0}
    for index in order[1:]:
        bounds = (int(lower[index]), int(upper[index]))
        offset = placed(bounds, int(width[index]), offsets.values(), likely_here.get(index))
        offsets[index] = offset
        lower = np.maximum(lower, offset + closed[index])
        upper = np.minimum(upper, offset - closed[:, index])
    return [offsets[index] - offsets[0] for index in range(len(ranks))]


def placed(bounds: tuple[int, int], width: int, moved: Iterable[int], likely: CommonEnd | None) -> int:
    """The offset of one rank within its bounds, ns.

    Args:
        width: how far a recorded clock may be moved and still be trusted.
        moved: the offsets of the ranks before it.
        likely: where its kernels end together with those of others.
    """
    lower, upper = bounds
    nearest: int | None = _clamp(0, lower, upper)
    if abs(nearest or 0) > width:
        distance, offset = min(
            ((abs(_clamp(other, lower, upper) - other), other) for other in moved), default=(width, 0)
        )
        nearest = _clamp(offset, lower, upper) if distance < width else None
    if likely is not None and (nearest is None or likely.demands_other_than(nearest)):
        return _clamp(likely.offset_ns, lower, upper)
    return (lower + upper) // 2 if nearest is None else nearest


def _clamp(offset_ns: int, lower: int, upper: int) -> int:
    return min(max(offset_ns, lower), upper)


def _closure(low: Matrix) -> Matrix | None:
    """The tightest bound of each pair by any chain of pairs (Floyd and Warshall); None where chains contradict each other."""
    closed: Matrix = low.copy()
    for index in range(len(closed)):
        np.maximum(closed, closed[:, index, None] + closed[index], out=closed)
        if closed.diagonal().max() > 0:
            return None
    return np.maximum(closed, -UNBOUNDED)
