"""Device work that one call launched together: the nodes of a CUDA graph."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pptrace.intervals import EMPTY, Int64, reduce_ranges, union
from pptrace.model.device import Rows

Bool = npt.NDArray[np.bool_]


def graph_spans(calls: Rows, start: Int64, end: Int64) -> Int64:
    """Times from the first node to the last one of every graph that ran, as a set of intervals.

    A launch with a single piece of work is no graph. What the device does not do inside a graph is due to the graph: all of it
    had been launched, and its nodes wait for each other.

    Args:
        calls: the host call that launched each work, −1 where it was not recorded.
        start, end: of each work.
    """
    order = np.argsort(calls, kind="stable")
    order = order[np.searchsorted(calls[order], 0) :]
    if not len(order):
        return EMPTY
    first = np.flatnonzero(np.diff(calls[order], prepend=-1))
    behind = np.append(first[1:], len(order))
    many = behind - first > 1
    if not many.any():
        return EMPTY
    low, high = first[many], behind[many]
    return union(reduce_ranges(np.minimum, start[order], low, high), reduce_ranges(np.maximum, end[order], low, high))


def inside(intervals: Int64, starts: Int64, ends: Int64) -> Bool:
    """Mask of the times [start, end) that lie in one of the disjoint intervals."""
    if not len(intervals):
        return np.zeros(len(starts), dtype=np.bool_)
    index = np.searchsorted(intervals[:, 0], starts, side="right") - 1
    are_inside: Bool = (index >= 0) & (ends <= intervals[np.maximum(index, 0), 1])
    return are_inside
