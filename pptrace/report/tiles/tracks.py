"""Bars of time as columns, in tracks: the bars of a track are sorted by start and by end, and do not overlap.

A *lane* is one kind of work of one rank: its ops, its receives, one axis of its collectives. Where bars of a lane overlap, they
are put into several tracks, one below the other, so that none hides another. An overlap below :data:`TOLERANCE` of the lane's
shortest bar counts as none: rounded times have such, and all rows would be half as high for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from pptrace.model.tables import Int64
from pptrace.slices import compact

Array = npt.NDArray[Any]

MOST_DEPTH = 200
"""Most tracks of a lane; what overlaps more than that shares the last one."""
TOLERANCE = 1 / 128
"""Overlap of two bars of a track, at most, as a part of the shortest bar of their lane."""
NUM_CLASSES = 9
"""Classes of a table's bars: their shares of a bucket are what is drawn where single bars are too short to be seen."""


class Tracks(Struct, frozen=True, dict=True):
    """The bars of some lanes; those of track t are the rows ``ptr[t]:ptr[t + 1]``, by start.

    ``rank``, ``lane`` and ``depth`` tell the tracks apart: index of the rank, code of the lane, track within it. Times are ns
    from the run's origin. ``group`` is the class of each bar, below :data:`NUM_CLASSES`; ``second`` the part of its length that
    belongs to class 0 instead (what a message waits), None where there is none. ``columns`` are further ones, an entry per bar.
    """

    ptr: Int64
    rank: Array
    lane: Array
    depth: Array
    start: Int64
    length: Array
    group: Array
    second: Array | None = None
    columns: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def of_rank(self) -> Mapping[int, Array]:
        """The tracks of each rank, by lane and depth."""
        if not len(self.rank):
            return {}
        order = np.lexsort((self.depth, self.lane, self.rank))
        ranks, first = np.unique(self.rank[order], return_index=True)
        return dict(zip(ranks.tolist(), np.split(order, first[1:]), strict=True))

    def tracks_of(self, ranks: Sequence[int]) -> Array:
        """The tracks of some ranks."""
        parts = [self.of_rank[rank] for rank in ranks if rank in self.of_rank]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    @cached_property
    def depths(self) -> Mapping[int, int]:
        """Number of tracks of each lane, of the rank that has most."""
        return {int(lane): int(self.depth[self.lane == lane].max()) + 1 for lane in np.unique(self.lane)}

    def depths_of_ranks(self, num_ranks: int, num_lanes: int) -> Array:
        """Number of tracks of each lane of each rank, 0 where it has no bar, shape (ranks, lanes)."""
        depths = np.zeros((num_ranks, num_lanes), dtype=np.int64)
        np.maximum.at(depths, (self.rank, self.lane), np.asarray(self.depth, dtype=np.int64) + 1)
        return depths

    def track_of(self, row: int) -> int:
        return int(np.searchsorted(self.ptr, row, side="right")) - 1


def make_tracks(
    rank: Array,
    lane: Array,
    start: Int64,
    length: Array,
    group: Array,
    second: Array | None = None,
    columns: Mapping[str, Array] | None = None,
) -> Tracks:
    """Sort bars into tracks; each argument has one entry per bar. Columns keep the smallest type that holds their values."""
    if not len(start):
        none = np.empty(0, dtype=np.int64)
        return Tracks(
            np.zeros(1, np.int64), none, none, none, none, none, none, None, dict.fromkeys(columns or {}, none)
        )
    num_lanes = int(lane.max()) + 1
    of_lane = rank.astype(np.int64) * num_lanes + lane
    depth = _depths(of_lane, start, length)
    key = of_lane * (MOST_DEPTH + 1) + depth
    order = stable_order(key) if (start[1:] >= start[:-1]).all() else np.lexsort((start, key))
    key = key[order]
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    of_track = key[first] // (MOST_DEPTH + 1)
    return Tracks(
        ptr=np.append(first, len(key)).astype(np.int64),
        rank=of_track // num_lanes,
        lane=of_track % num_lanes,
        depth=key[first] % (MOST_DEPTH + 1),
        start=start[order],
        length=_ordered(length, order),
        group=_ordered(group, order),
        second=None if second is None else _ordered(second, order),
        columns={name: _ordered(values, order) for name, values in (columns or {}).items()},
    )


def _ordered(values: Array, order: Int64) -> Array:
    """A compact column in another order; one of a single value takes no memory."""
    values = compact(values)
    if len(values) and bool((values == values[0]).all()):
        return np.broadcast_to(values[:1].copy(), len(values))
    return values[order]


def stable_order(values: Array) -> Array:
    """Indices that sort whole numbers, equal ones in their order; of small numbers in linear time."""
    return np.argsort(compact(values), kind="stable")


def _depths(lane: Int64, start: Int64, length: Array) -> Array:
    """The track of each bar within its lane, of as few as bars of it overlap: in order of start each is in one that is free.

    Where bars of a lane lie inside each other, as calls do, that is how many are open around each. In other lanes each is in
    the first track that is free. One pass finds the bars of one track at once: from the first bar on, each one's successor is
    the next that begins after its end, and by doubling the jumps log n steps reach all of them.
    """
    depth = np.zeros(len(start), dtype=np.uint8)
    is_ordered = (start[1:] > start[:-1]) | ((start[1:] == start[:-1]) & (length[1:] <= length[:-1]))
    order = stable_order(lane) if is_ordered.all() else np.lexsort((-length, start, lane))
    shortest = np.full(int(lane.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(shortest, lane, length)
    allowed = (shortest * TOLERANCE).astype(np.int64)[lane]  # the overlap with the next one that counts as none, ns
    cuts = np.flatnonzero(np.r_[True, np.diff(lane[order]) != 0, True])
    left = []
    for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        rows = order[low:high]
        nested = _nested_depths(start[rows], length[rows], int(allowed[rows[0]]))
        if nested is None:
            left.append(rows)
        else:
            depth[rows] = nested
    if not left:
        return depth
    order = np.concatenate(left)
    end = start + length - allowed
    for number in range(MOST_DEPTH):
        on_first = _chain(lane[order], start[order], end[order])
        depth[order] = number
        order = order[~on_first]
        if not len(order):
            return depth
    depth[order] = MOST_DEPTH
    return depth


def _nested_depths(start: Int64, length: Array, allowed: int) -> Array | None:
    """Number of bars of a lane that are open when each begins; None where two of them overlap otherwise, or are too deep."""
    end = start + np.maximum(length - allowed, 1)
    depth = np.arange(len(start)) - np.searchsorted(np.sort(end), start, side="right")
    if depth.max() >= MOST_DEPTH:
        return None
    order = stable_order(depth)
    of_depth, start, end = depth[order], start[order], end[order]
    overlaps = (of_depth[1:] == of_depth[:-1]) & (start[1:] < end[:-1])
    return None if overlaps.any() else depth


def _chain(lane: Int64, start: Int64, end: Int64) -> npt.NDArray[np.bool_]:
    """Mark the bars, sorted by lane and start, that the first track of each lane holds."""
    firsts = np.flatnonzero(np.r_[True, lane[1:] != lane[:-1]])
    ends_lane = np.repeat(np.append(firsts[1:], len(lane)), np.diff(np.append(firsts, len(lane))))
    is_free = start[1:] >= end[:-1]
    if (is_free | (lane[1:] != lane[:-1])).all():
        return np.ones(len(lane), dtype=np.bool_)
    after = _first_from(lane, start, end)
    after = np.where(after < ends_lane, after, len(lane))
    after = np.append(after, len(lane))
    reached = np.zeros(len(lane) + 1, dtype=np.bool_)
    reached[firsts] = True
    jump = after
    while True:
        more = reached.copy()
        more[jump[reached]] = True
        if (more == reached).all():
            return reached[:-1]
        reached, jump = more, jump[jump]


def _first_from(lane: Int64, start: Int64, end: Int64) -> Int64:
    """The first bar of the same lane that begins at or after each bar's end (or the next lane's first bar), and after the bar."""
    low = int(start.min())
    width = int(end.max()) - low + 1
    numbers = np.cumsum(np.r_[0, lane[1:] != lane[:-1]])
    if (int(numbers[-1]) + 1) * width < 2**62:
        found = np.searchsorted(numbers * width + (start - low), numbers * width + (end - low))
    else:
        cuts = np.append(np.flatnonzero(np.r_[True, np.diff(numbers) > 0]), len(lane))
        found = np.concatenate(
            [
                a + np.searchsorted(start[a:b], end[a:b])
                for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)
            ]
        )
    return np.maximum(found, np.arange(1, len(lane) + 1))
