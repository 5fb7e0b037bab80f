"""A tile: the bars of some tracks in a range of time, single ones where they can be seen, else shares of buckets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from pptrace.model.tables import Int64
from pptrace.report.tiles.pyramid import Level, busy_by_class, longest_of
from pptrace.report.tiles.tracks import NUM_CLASSES, Array, Tracks

NUM_BUCKETS = 1024
"""Buckets of a tile; the browser asks for buckets of about a pixel."""
_ALWAYS_BARS = 6_000
"""A tile with up to this number of bars has each of them."""
_MOST_ROWS = 250_000
"""Above this number of bars the pyramid is asked, if it has a level fine enough."""
SEEN_BUCKETS = 2
"""A bar that is at least as many buckets long is in the tile by itself, whatever there is around it."""


class Range(Struct, frozen=True):
    """The time of a tile: :data:`NUM_BUCKETS` buckets of 2^``shift`` ns, the ``index``-th of those that cover the time from 0."""

    shift: int
    index: int

    @property
    def begin(self) -> int:
        return self.index * NUM_BUCKETS << self.shift

    @property
    def end(self) -> int:
        return (self.index + 1) * NUM_BUCKETS << self.shift


class Tile(Struct, frozen=True):
    """``rows`` and ``track`` (index among those asked for) of single bars; the first ``num_earlier`` began before the tile.

    Cells are buckets with bars too short to be seen: ``cell_track``, ``cell_bucket``, how many bars begin there, the row of
    the longest (where none begins, of one that runs), and the shares of the bucket by class in 1/255, shape (cells, classes). The
    bars that do not begin earlier and the counts add up to the rows that begin in the tile.
    """

    rows: Array
    track: Array
    num_earlier: int
    cell_track: Array
    cell_bucket: Array
    cell_count: Array
    cell_longest: Array
    cell_shares: Array

    @property
    def count(self) -> int:
        return len(self.rows) - self.num_earlier + int(self.cell_count.sum())


def cut(tracks: Tracks, levels: Sequence[Level], wanted: Array, time: Range) -> Tile:
    """Cut the tile of the ``wanted`` tracks in a range of time."""
    low, high = _bounds(tracks.start, tracks.ptr, wanted, time)
    earlier = _reaching_in(tracks, wanted, low, time)
    num_rows = int((high - low).sum())
    level = _level(levels, time.shift) if num_rows > _MOST_ROWS else None
    if level is not None:
        return _from_level(tracks, level, wanted, time, earlier)
    rows, track = _expand(low, high)
    if num_rows <= _ALWAYS_BARS:
        return _tile(earlier, rows, track, _no_cells())
    is_seen = tracks.length[rows] >= SEEN_BUCKETS << time.shift
    cells = _cells(tracks, rows[~is_seen], track[~is_seen], time)
    return _tile(earlier, rows[is_seen], track[is_seen], cells)


_Cells = tuple[Array, Array, Array, Array, Array]
"""The last five fields of a tile."""


def _no_cells() -> _Cells:
    none = np.empty(0, dtype=np.int64)
    return none, none, none, none, np.empty((0, NUM_CLASSES), dtype=np.uint8)


def _tile(earlier: tuple[Array, Array], rows: Array, track: Array, cells: _Cells) -> Tile:
    before, of_track = earlier
    return Tile(np.concatenate((before, rows)), np.concatenate((of_track, track)), len(before), *cells)


def _bounds(start: Int64, ptr: Int64, wanted: Array, time: Range) -> tuple[Int64, Int64]:
    """First row of each track that begins in the range, and the one after the last."""
    edges = np.array((time.begin, time.end), dtype=np.int64)
    first, last = ptr[wanted].tolist(), ptr[wanted + 1].tolist()
    found = [np.searchsorted(start[a:b], edges) + a for a, b in zip(first, last, strict=True)]
    bounds = np.array(found, dtype=np.int64).reshape(-1, 2)
    return bounds[:, 0], bounds[:, 1]


def _reaching_in(tracks: Tracks, wanted: Array, low: Int64, time: Range) -> tuple[Array, Array]:
    """The bars that began before the range and reach into it, with their tracks: one of each track at most."""
    has_one = low > tracks.ptr[wanted]
    before = np.maximum(low - 1, 0)
    if not len(tracks):
        return before[:0], before[:0]
    reaches = has_one & (tracks.start[before] + tracks.length[before] > time.begin)
    return before[reaches], np.flatnonzero(reaches)


def _expand(low: Int64, high: Int64) -> tuple[Array, Array]:
    """The rows of several stretches, and the index of the stretch of each."""
    counts = high - low
    track = np.repeat(np.arange(len(low)), counts)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return low[track] + within, track


def _cells(tracks: Tracks, rows: Array, track: Array, time: Range) -> _Cells:
    """The cells of bars too short to be seen: a bar's time is in all buckets that it runs in, its count where it begins."""
    if not len(rows):
        return _no_cells()
    offset = tracks.start[rows] - time.begin
    key = track * NUM_BUCKETS + (offset >> time.shift)
    num_keys = (int(track.max()) + 1) * NUM_BUCKETS
    busy, runs = _busy_of_buckets(tracks, rows, key, offset, num_keys, time)
    count = np.bincount(key, minlength=num_keys)
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    of_key = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(key))))
    runs[key[first]] = longest_of(tracks, rows, of_key, first)
    cells = np.flatnonzero(runs >= 0)
    shares = shares_of(busy[cells], 1 << time.shift)
    return cells // NUM_BUCKETS, cells % NUM_BUCKETS, count[cells], runs[cells], shares


def _busy_of_buckets(
    tracks: Tracks, rows: Array, key: Int64, offset: Int64, num_keys: int, time: Range
) -> tuple[Array, Int64]:
    """(time by bucket and class, a bar that runs in each bucket or −1) of bars shorter than two buckets."""
    width, left = 1 << time.shift, tracks.length[rows].astype(np.int64)
    busy, runs = np.zeros((num_keys, NUM_CLASSES), dtype=np.float64), np.full(num_keys, -1, dtype=np.int64)
    length, room = np.maximum(left, 1), width - (offset & (width - 1))
    for _ in range(SEEN_BUCKETS + 1):
        part = np.minimum(left, room)
        busy += busy_by_class(tracks, rows, key, num_keys, part / length)
        runs[key] = rows
        continues = (left > part) & (key % NUM_BUCKETS < NUM_BUCKETS - 1)
        if not continues.any():
            break
        rows, key, left, length = rows[continues], key[continues] + 1, (left - part)[continues], length[continues]
        room = np.full(len(rows), width)
    return busy, runs


def shares_of(busy: Array, bucket_ns: float) -> Array:
    """Times by class as parts of a bucket, in 1/255; together at most 255, and what is there at least 1."""
    whole = np.maximum(busy.sum(axis=1, keepdims=True), bucket_ns)
    shares = np.floor(busy / whole * 255)
    return np.where(busy > 0, np.maximum(shares, 1), 0).astype(np.uint8)


def _level(levels: Sequence[Level], shift: int) -> Level | None:
    """The coarsest level whose buckets are no longer than the tile's."""
    return next((level for level in reversed(levels) if level.shift <= shift), None)


def _from_level(tracks: Tracks, level: Level, wanted: Array, time: Range, earlier: tuple[Array, Array]) -> Tile:
    low, high = _bounds(level.start, level.ptr, wanted, time)
    at, track = _expand(low, high)
    longest, count, busy = level.longest[at], level.count[at].astype(np.int64), level.busy[at]
    is_seen = tracks.length[longest] >= SEEN_BUCKETS << time.shift
    seen = longest[is_seen].astype(np.int64)
    count[is_seen] -= 1
    alone = busy_by_class(tracks, seen, np.arange(len(seen)), len(seen))
    busy[is_seen] = np.maximum(busy[is_seen] - alone, 0)
    is_left = count > 0
    at, of_left, longest, count, busy = at[is_left], track[is_left], longest[is_left], count[is_left], busy[is_left]
    bars = seen, track[is_seen]
    if not len(at):
        return _tile(earlier, *bars, _no_cells())
    bucket = (level.start[at] - time.begin) >> time.shift
    key = of_left * NUM_BUCKETS + bucket
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    cell = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(key))))
    cells = (
        of_left[first],
        bucket[first],
        np.add.reduceat(count, first),
        longest_of(tracks, longest, cell, first),
        shares_of(np.add.reduceat(busy, first, axis=0), 1 << time.shift),
    )
    return _tile(earlier, *bars, cells)


def cut_together(tracks: Tracks, levels: Sequence[Level], wanted: Array, time: Range) -> Array:
    """The time of all ``wanted`` tracks by bucket and class, ns, for one row of them."""
    low, high = _bounds(tracks.start, tracks.ptr, wanted, time)
    earlier, _ = _reaching_in(tracks, wanted, low, time)
    level = _level(levels, time.shift) if int((high - low).sum()) > _MOST_ROWS else None
    if level is None:
        rows, _ = _expand(low, high)
        return _spread(tracks, np.concatenate((earlier, rows)), time)
    at, _ = _expand(*_bounds(level.start, level.ptr, wanted, time))
    bucket = (level.start[at] - time.begin) >> time.shift
    longest = level.longest[at].astype(np.int64)
    is_long = tracks.length[longest] >= 1 << time.shift
    alone = busy_by_class(tracks, longest[is_long], np.arange(int(is_long.sum())), int(is_long.sum()))
    short = level.busy[at]
    short[is_long] = np.maximum(short[is_long] - alone, 0)
    busy = _spread(tracks, np.concatenate((earlier, longest[is_long])), time)
    for number in range(NUM_CLASSES):
        busy[:, number] += np.bincount(bucket, short[:, number], NUM_BUCKETS)
    return busy


def _spread(tracks: Tracks, rows: Array, time: Range) -> Array:
    """The time of bars in each bucket by class, ns, exact: the integral of how many of them run."""
    busy = np.zeros((NUM_BUCKETS, NUM_CLASSES), dtype=np.float64)
    start, end = tracks.start[rows], tracks.start[rows] + tracks.length[rows]
    group = tracks.group[rows]
    second = None if tracks.second is None else tracks.second[rows]
    for number in np.unique(group).tolist():
        of_group = group == number
        lost = 0 if second is None else second[of_group]
        busy[:, number] += _integral(start[of_group] + lost, end[of_group], time)
    if second is not None:
        busy[:, 0] += _integral(start, start + second, time)
    return busy


def _integral(start: Int64, end: Int64, time: Range) -> Array:
    return _filled_from(start, time) - _filled_from(end, time)


def _filled_from(edge: Int64, time: Range) -> Array:
    """The time of each bucket after some edges, summed, ns."""
    at = np.clip(edge, time.begin, time.end) - time.begin
    bucket = at >> time.shift
    rest = ((bucket + 1) << time.shift) - at
    here = np.bincount(bucket, rest, NUM_BUCKETS + 1)[:NUM_BUCKETS]
    before = np.bincount(bucket + 1, minlength=NUM_BUCKETS + 2)[:NUM_BUCKETS]
    filled: Array = here + np.cumsum(before) * float(1 << time.shift)
    return filled
