"""Sets of time: unions, intersections and differences of half-open intervals in integer nanoseconds.

A set is an (n, 2) int64 array of [start, end) rows, sorted, disjoint and without empty rows; :func:`union` makes one from
anything. Everything is exact and vectorised. Intervals that may nest and overlap, such as the ranges of a thread, are looked
up with :class:`NestedIntervals`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

EMPTY: Int64 = np.empty((0, 2), dtype=np.int64)


def union(start: npt.ArrayLike, end: npt.ArrayLike) -> Int64:
    """The set covered by intervals given as two equally long arrays; intervals that end before they start count as empty.

    Starts and ends are sorted separately: a gap opens where the i-th start lies beyond the (i−1)-th end.
    """
    starts = np.asarray(start, dtype=np.int64)
    ends = np.asarray(end, dtype=np.int64)
    keep = ends > starts
    if not keep.all():
        starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return EMPTY
    starts, ends = np.sort(starts, kind="stable"), np.sort(ends, kind="stable")
    opens = np.concatenate(([True], starts[1:] > ends[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    return np.stack((starts[opens], ends[closes]), axis=1)


def merge(*sets: Int64) -> Int64:
    """The union of several sets."""
    rows = np.concatenate(sets) if sets else EMPTY
    return union(rows[:, 0], rows[:, 1])


def intersect(a: Int64, b: Int64) -> Int64:
    """Intersection of two sets."""
    a, b = _near(a, b), _near(b, a)
    if not len(a) or not len(b):
        return EMPTY
    starts = np.sort(np.concatenate((a[:, 0], b[:, 0])), kind="stable")
    ends = np.sort(np.concatenate((a[:, 1], b[:, 1])), kind="stable")
    # Two disjoint sets cover a point at most twice, and twice exactly between the i-th start and the (i-1)-th end.
    low, high = starts[1:], ends[:-1]
    keep = high > low
    return np.stack((low[keep], high[keep]), axis=1)


def subtract(a: Int64, b: Int64) -> Int64:
    """Difference of two sets: where ``a`` is and ``b`` is not."""
    b = _near(b, a)
    if not len(a) or not len(b):
        return a
    lowest, highest = min(a[0, 0], b[0, 0]) - 1, max(a[-1, 1], b[-1, 1]) + 1
    starts = np.concatenate(([lowest], b[:, 1]))
    ends = np.concatenate((b[:, 0], [highest]))
    return intersect(a, union(starts, ends))


def clip(a: Int64, start: int, end: int) -> Int64:
    """The part of a set inside [start, end)."""
    if end <= start:
        return EMPTY
    inside: Int64 = a[np.searchsorted(a[:, 1], start, side="right") : np.searchsorted(a[:, 0], end)]
    if not len(inside) or (inside[0, 0] >= start and inside[-1, 1] <= end):
        return inside
    return np.clip(inside, start, end)


def _near(a: Int64, b: Int64) -> Int64:
    """The rows of a set between the first and the last time of another: a step's part of a whole trace is small."""
    if not len(a) or not len(b):
        return a
    first, last = np.searchsorted(a[:, 1], b[0, 0], side="right"), np.searchsorted(a[:, 0], b[-1, 1])
    return a[first:last]


def union_by_group(groups: npt.ArrayLike, start: npt.ArrayLike, end: npt.ArrayLike) -> tuple[Int64, Int64]:
    """(group of each row, rows) of the sets that the intervals of each group cover; rows in the order of the groups.

    Args:
        groups: the group of each interval, in ascending order.
        start, end: as in :func:`union`.
    """
    starts, ends = np.asarray(start, dtype=np.int64), np.asarray(end, dtype=np.int64)
    keep = ends > starts
    of_row, starts, ends = np.asarray(groups, dtype=np.int64)[keep], starts[keep], ends[keep]
    if not len(starts):
        return np.zeros(0, dtype=np.int64), EMPTY
    firsts = np.flatnonzero(np.concatenate(([True], of_row[1:] != of_row[:-1])))
    low, high = np.minimum.reduceat(starts, firsts), np.maximum.reduceat(ends, firsts)
    # Each group is moved behind the one before it, so that one union serves all of them.
    begins = np.concatenate(([0], np.cumsum(high - low + 1)))[:-1]
    moves = begins - low
    move_of_row = np.repeat(moves, np.diff(np.append(firsts, len(starts))))
    packed = union(starts + move_of_row, ends + move_of_row)
    index = np.searchsorted(begins, packed[:, 0], side="right") - 1
    rows: Int64 = packed - moves[index, None]
    return of_row[firsts][index], rows


def times_by_group(*pairs: tuple[Int64, Int64]) -> tuple[Int64, ...]:
    """Keys of pairs of groups and times, ns: all of a group come after those of the groups before it, in order of time.

    Keys of one call compare with each other. Groups and times of a pair may have any shapes that broadcast.
    """
    filled = [times for _, times in pairs if times.size]
    if not filled:
        return tuple(times.copy() for _, times in pairs)
    low = min(int(times.min()) for times in filled)
    extent = max(int(times.max()) for times in filled) - low + 1
    return tuple(group * extent + times - low for group, times in pairs)


def length(a: Int64) -> int:
    """Total time of a set, ns."""
    return int((a[:, 1] - a[:, 0]).sum())


def lengths_within(a: Int64, starts: npt.ArrayLike, ends: npt.ArrayLike) -> Int64:
    """Length of a set within each of several intervals, ns."""
    edges = a.reshape(-1)
    past = np.zeros(len(edges) + 1, dtype=np.int64)
    np.cumsum(a[:, 1] - a[:, 0], out=past[2::2])
    np.subtract(past[:-2:2], a[:, 0], out=past[1::2])

    def before(times: Int64) -> Int64:
        num_edges = np.searchsorted(edges, times)  # an odd number: the time is inside the set
        return past[num_edges] + (num_edges & 1) * times

    first, last = np.asarray(starts, dtype=np.int64), np.asarray(ends, dtype=np.int64)
    return np.where(last > first, before(last) - before(first), 0)


def find_interval(starts: Int64, ends: Int64, times: npt.ArrayLike, until: npt.ArrayLike | None = None) -> Int64:
    """The index of the last interval, in the order of their starts, that has begun at each time; −1 where there is none or it has
    ended by then. With ``until``: where it ends before that.
    """
    index = np.searchsorted(starts, times, side="right") - 1
    ends_there = np.append(ends, np.iinfo(np.int64).min)[index]
    return np.where(ends_there > times if until is None else ends_there >= until, index, -1)


def earliest_from(values: Int64) -> Int64:
    """The least of the values from each one on; behind the last one the largest number there is."""
    return np.append(np.minimum.accumulate(values[::-1])[::-1], np.iinfo(np.int64).max)


def reduce_ranges(function: np.ufunc, values: Int64, low: Int64, high: Int64) -> Int64:
    """A function such as ``np.minimum`` of ``values[low:high]`` for each of several stretches of values, none of them empty."""
    bounds = np.stack((low, high), axis=1).reshape(-1)
    reduced: Int64 = function.reduceat(np.append(values, values[-1:]), bounds)[::2]
    return reduced


class NestedIntervals:
    """Half-open intervals in the order of their starts, which may nest and overlap, looked up by time."""

    def __init__(self, starts: Int64, ends: Int64) -> None:
        self.starts = starts
        self.ends = ends
        self.latest_ends: Int64 = np.maximum.accumulate(ends)
        """Latest end of the intervals up to each one."""
        self._ends_before = np.append(np.iinfo(np.int64).min, self.latest_ends)

    def hold(self, times: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return whether any interval has started at each of these times, and not yet ended."""
        inside: npt.NDArray[np.bool_] = np.asarray(times) < self._latest_ends_at(times)
        return inside

    def cover(self, starts: npt.ArrayLike, ends: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return whether any one interval reaches from each of these stretches' start, or before, to its end or beyond."""
        covered: npt.NDArray[np.bool_] = np.asarray(ends) <= self._latest_ends_at(starts)
        return covered

    def outermost(self, starts: npt.ArrayLike, ends: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The index of the first interval that covers each of these stretches; −1 where none does."""
        first = np.searchsorted(self.latest_ends, ends)
        return np.where(first < np.searchsorted(self.starts, starts, side="right"), first, -1)

    def innermost(self, times: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The index of the last interval that has started at each time and not yet ended; −1 where there is none."""
        at = np.asarray(times)
        index = np.searchsorted(self.starts, at, side="right") - 1
        while (over := np.flatnonzero((index >= 0) & (self.ends[index] <= at))).size:
            index[over] = self.enclosing[index[over]]
        return index

    def at_level(self, times: npt.ArrayLike, level: int) -> npt.NDArray[np.int64]:
        """The same, but of the intervals around it the one of a level (0: the outermost), or the innermost if none is as deep."""
        index = self.innermost(times)
        while (deeper := np.flatnonzero((index >= 0) & (self.levels[index] > level))).size:
            index[deeper] = self.enclosing[index[deeper]]
        return index

    @cached_property
    def levels(self) -> npt.NDArray[np.int64]:
        """The number of intervals around each one."""
        levels, around = np.zeros(len(self.starts), dtype=np.int64), self.enclosing
        while (inner := np.flatnonzero(around >= 0)).size:
            levels[inner] += 1
            around = np.where(around >= 0, self.enclosing[around], -1)
        return levels

    @cached_property
    def enclosing(self) -> npt.NDArray[np.int64]:
        """The index of the last interval that began before each one and had not ended when it began; −1 where there is none."""
        around = np.arange(-1, len(self.starts) - 1)
        while (over := np.flatnonzero((around >= 0) & (self.ends[around] <= self.starts))).size:
            around[over] = around[around[over]]
        return around

    def are_inside_another(self) -> npt.NDArray[np.bool_]:
        """Mark the intervals that begin inside one that began before them."""
        inside = np.zeros(len(self.starts), dtype=np.bool_)
        inside[1:] = self.starts[1:] < self.latest_ends[:-1]
        return inside

    def _latest_ends_at(self, times: npt.ArrayLike) -> Int64:
        """The latest end of the intervals that have started at each time; the least of all numbers where none has."""
        ends: Int64 = self._ends_before[np.searchsorted(self.starts, times, side="right")]
        return ends
