"""The likely offset within its bounds: kernels of one communication end at the same time on all of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from pptrace.clock.bounds import ALL_TO_ALL
from pptrace.marks import P2P


@dataclass(frozen=True, slots=True)
class _Edge:
    """``ahead_ns`` is what must be added to the second rank's times, against the first's, for their ends to agree."""

    first: int
    second: int
    is_message: bool  # its send may be done early: the mean of both ways leaves that out
    count: int
    ahead_ns: int


def offsets_by_common_ends(matched: pd.DataFrame, ranks: Sequence[int]) -> dict[int, int]:
    """Offsets against the first rank, ns, of the ranks that kernels relate to it; medians, collectives before messages."""
    edges = sorted(
        _edges(matched.loc[matched["clock"] == "device", ["rank", "kind", "match", "end_ns"]]),
        key=lambda edge: (edge.is_message, -edge.count, edge.first, edge.second),
    )
    offsets = {ranks[0]: 0}
    while edge := next((edge for edge in edges if (edge.first in offsets) != (edge.second in offsets)), None):
        if edge.first in offsets:
            offsets[edge.second] = offsets[edge.first] + edge.ahead_ns
        else:
            offsets[edge.first] = offsets[edge.second] - edge.ahead_ns
    return offsets


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
        difference = (pairs["end_ns"] - pairs["end_ns_other"]).groupby([pairs["rank"], pairs["rank_other"]])
        table = difference.agg(["median", "size"]).rename_axis(["one", "other"]).reset_index()
        by_pair = {(one, other): (median, size) for one, other, median, size in table.itertuples(index=False)}
        for one, other in {(min(pair), max(pair)) for pair in by_pair if pair[0] != pair[1]}:
            both_directions = [
                (sign, *by_pair[pair]) for sign, pair in ((1, (one, other)), (-1, (other, one))) if pair in by_pair
            ]
            mean = sum(sign * median for sign, median, _ in both_directions) / len(both_directions)
            yield _Edge(one, other, is_message, sum(size for *_, size in both_directions), round(mean))
