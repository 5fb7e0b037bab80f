"""Mipmaps of tracks: for buckets of more and more time, how many bars begin there, the longest of them, and time by class."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from pptrace.model.tables import Int64
from pptrace.report.tiles.tracks import NUM_CLASSES, Array, Tracks

_BARS_PER_CELL = 16
_FACTOR_BITS = 2
_FEWEST_BUCKETS = 512


class Level(Struct, frozen=True):
    """The buckets of 2^``shift`` ns that have bars; those of track t are ``ptr[t]:ptr[t + 1]``.

    ``start`` is the begin of a bucket, ``count`` how many bars begin in it, ``longest`` the row of the longest, ``busy`` the time
    of its bars by class, ns, shape (buckets, classes).
    """

    shift: int
    ptr: Int64
    start: Int64
    count: Array
    longest: Array
    busy: Array


def busy_by_class(tracks: Tracks, rows: Array | slice, cell: Int64, num_cells: int, part: Array | float = 1.0) -> Array:
    """The time of some bars, or of a ``part`` of each, by their cells and classes, ns, shape (cells, classes)."""
    length, group = tracks.length[rows] * np.float64(1) * part, tracks.group[rows]
    busy = np.zeros((num_cells, NUM_CLASSES), dtype=np.float32)
    if tracks.second is not None:
        second = tracks.second[rows] * np.float64(1) * part
        busy[:, 0] += np.bincount(cell, second, num_cells)
        length -= second
    for number in np.unique(group).tolist():
        of_group = group == number
        if of_group.all():
            busy[:, number] += np.bincount(cell, length, num_cells)
        else:
            busy[:, number] += np.bincount(cell[of_group], length[of_group], num_cells)
    return busy


def make_pyramid(tracks: Tracks) -> tuple[Level, ...]:
    """The levels of a table, the finest first; none of a table that is small enough without."""
    if len(tracks) < 4 * _BARS_PER_CELL * _FEWEST_BUCKETS:
        return ()
    last = np.maximum(tracks.ptr[1:] - 1, 0)
    extent = int((tracks.start[last] - tracks.start[tracks.ptr[:-1]]).sum())
    shift = max(int(np.log2(max(extent / len(tracks), 1) * _BARS_PER_CELL)), 0)
    levels = [_finest(tracks, shift)]
    span = int(tracks.start[last].max())
    while span >> levels[-1].shift > _FEWEST_BUCKETS:
        levels.append(_coarser(tracks, levels[-1]))
    return tuple(levels)


def _finest(tracks: Tracks, shift: int) -> Level:
    bucket = tracks.start >> shift
    opens = np.ones(len(tracks), dtype=np.bool_)
    opens[1:] = bucket[1:] != bucket[:-1]
    opens[tracks.ptr[:-1]] = True
    first = np.flatnonzero(opens)
    cell = np.cumsum(opens) - 1
    longest = longest_of(tracks, np.arange(len(tracks)), cell, first)
    return Level(
        shift=shift,
        ptr=np.searchsorted(first, tracks.ptr),
        start=bucket[first] << shift,
        count=np.diff(np.append(first, len(tracks))).astype(np.int32),
        longest=longest,
        busy=busy_by_class(tracks, slice(None), cell, len(first)),
    )


def longest_of(tracks: Tracks, rows: Array, cell: Int64, first: Array) -> Array:
    """The row of the longest bar of each cell."""
    length = tracks.length[rows]
    is_longest = np.flatnonzero(length == np.maximum.reduceat(length, first)[cell])
    of_cell = cell[is_longest]
    return rows[is_longest[np.r_[True, of_cell[1:] != of_cell[:-1]]]].astype(np.int32)


def _coarser(tracks: Tracks, finer: Level) -> Level:
    shift = finer.shift + _FACTOR_BITS
    bucket = finer.start >> shift
    opens = np.r_[True, bucket[1:] != bucket[:-1]]
    starts = finer.ptr[:-1]
    opens[starts[starts < len(opens)]] = True
    first = np.flatnonzero(opens)
    cell = np.cumsum(opens) - 1
    return Level(
        shift=shift,
        ptr=np.searchsorted(first, finer.ptr),
        start=bucket[first] << shift,
        count=np.add.reduceat(finer.count, first),
        longest=longest_of(tracks, finer.longest, cell, first),
        busy=np.add.reduceat(finer.busy, first, axis=0),
    )
